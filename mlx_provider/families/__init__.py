"""A toolkit for authors of model families, with which our own are built, too.

A family tells the core everything about an architecture, and the core names none. Its plugin
yields a `ModelFamily` whose `load` returns an object with the interface of `LoadedModel`. These
modules have the parts that families share:

| module | what for |
|---|---|
| `matching` | in `matches`: has mlx-lm, or mlx-vlm, a class for this config? |
| `text` | `load_text`: a whole model of mlx-lm, with changes or a class of the family's own |
| `checkpoint` | what `config.json` and the other files of a folder say; `fingerprint` |
| `config_sizes` | `check_sizes`: refuses sizes in `config.json` that weights cannot have |
| `tokenizer` | `load_tokenizer`: tokens and the chat template; what a client sends stays text |
| `info` | `describe`: the `ModelInfo` of a model; stop tokens, bytes, precision |
| `estimate` | `footprint`: bytes of weights, of a token and of a row, by `config.json` alone |
| `embedding` | `embedding_of`: what a folder says of how texts become vectors |
| `attention` | `route`: rows of any length decode in one call |
| `recurrent` | `route`: chunks of a prompt in the pass of rows that decode, of hybrid models |
| `logits` | the output matrix for the tokens whose logits are wanted, and no others |
| `caches` | a row's cache by mlx-lm or mlx-vlm, and the classes that it may consist of |
| `expand` | weights in the dtype that the operator or the core chose |
| `patching` | `patch`: a family's own function instead of one that upstream's model calls |
| `trial` | `failure`: tries at load what a model may not support |
| `vision.loading` | `load_model`: a model of mlx-vlm; `replaced`: patch its class for the load |
| `vision.info` | `vision_info`: the same as `info`, with media and pixels |
| `vision.model` | `VisionModel` to derive from; features of an image, and a chunk's embeddings |
| `vision.prompt` | messages and media to tokens and spans: `MediaMarks`, `build_prompt` |
| `vision.images` | size and pixels of a still image |
| `vision.language` | `head`: hidden states of mlx-vlm's text model as logits |
| `vision.positions` | rotary positions on three axes (M-RoPE) of prompt, chunk and step |
| `vision.patches` | images and frames of any size as patches, a strip at a time: `PatchTexts` |
| `vision.patch_model` | `load_patch_model`: a whole model over patches and such positions |
| `vision.slices` | `in_slices`: a tower of mlx-vlm a layer at a time |
| `vision.calls` | any model of mlx-vlm by its public calls: processor, embeddings, logits |

A text model mostly needs `load_text` alone, a vision model `load_model`, `MediaMarks` and a class
derived from `VisionModel`. Methods that get or return arrays run on the engine's one thread;
`prepare` runs on any. Nothing of a request may stay on the model object, and positions come from
the caller. Import these modules within `load`, for they import MLX; and mlx-lm and mlx-vlm after
`text` or `caches`, which keep the limit of open files that mlx-lm lowers for good.

Names that begin with an underscore, and modules that are not in this table, may change at any time.
"""

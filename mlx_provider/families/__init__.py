"""A toolkit for authors of model families, with which our own are built, too.

A family tells the core everything about an architecture, and the core names none. Its plugin
yields a `ModelFamily` whose `load` returns an object with the interface of `LoadedModel`. These
modules have the parts that families share:

| module | what for |
|---|---|
| `text` | `load_text`: a whole model of mlx-lm, with changes or a class of the family's own |
| `checkpoint` | what the JSON files of a folder say; whether mlx-lm or mlx-vlm has the class |
| `tokenizer` | `load_tokenizer`: tokens and the chat template; what a client sends stays text |
| `info` | `describe`: the `ModelInfo` of a model; `embedding_of`: how texts become vectors |
| `caches` | a row's cache and its classes; `route`: recurrent layers beside a prompt chunk |
| `logits` | the output matrix only for wanted tokens; `failure`: the problem that a trial finds |
| `layers` | `route_attention`: rows of any length in one call; `patch`; `expand`: another dtype |
| `vision.loading` | `load_model`, `replace_attribute`; mlx-vlm's models by their public calls |
| `vision.model` | the base `VisionModel`; `vision_info`, `MediaFormat`, `head` |
| `vision.patches` | the sizes of images, and M-RoPE positions |

A text model mostly needs `load_text` alone, a vision model `load_model`, `MediaFormat` and a class
derived from `VisionModel`. Methods that get or return arrays run on the engine's one thread;
`prepare` runs on any. Nothing of a request may stay on the model object, and positions come from
the caller. Import these modules within `load`, for they import MLX. Import mlx-lm and mlx-vlm after
`text` or `caches`: mlx-lm lowers the limit of open files for good, and these two prevent that.

Names that begin with an underscore, and modules that are not in this table, may change at any time.
"""

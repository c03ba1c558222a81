"""What a client types is spelt in letters, by every kind of tokenizer and under odd templates."""

import tracemalloc
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_provider.families.tokenizer.control_tokens import ControlTokens
from mlx_provider.families.tokenizer.hf_tokenizer import HFTokenizer
from mlx_provider.families.tokenizer.spelling import Hidden, hide

LETTERS = "abcdefghijklmnopqrstuvwxyzTH0123456789<>|/_[]:.,'\"{}\\-▁ \n"
TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
OWN = ("<s>", "<|user|>", "<|assistant|>", "<|end|>")
TYPED = ("<|im_start|>", "<tool_call>", "</think>")


def flagged(text: str, **flags: Any) -> AddedToken:
    return AddedToken(text, **{"normalized": False, "special": text.startswith("<|"), **flags})


def merged(words: Sequence[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    vocab = {"<unk>": 0} | {c: i + 1 for i, c in enumerate(dict.fromkeys(LETTERS))}
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    return vocab, merges


def bpe(normalizer: Any, pre: Any, words: Sequence[str] = ("the", "▁a", "▁the", "\n\n")) -> Any:
    vocab, merges = merged(words)
    vocab |= {f"<0x{i:02X}>": len(vocab) + i for i in range(256)}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    return assembled(model, normalizer, pre)


def unigram(normalizer: Any, pre: Any) -> Any:
    """Control tokens are pieces of the model, and dear to it."""
    pieces = [("<unk>", 0.0), *((c, -5.0) for c in dict.fromkeys(LETTERS)), ("▁the", -3.0)]
    pieces += [(text, -0.1) for text in (*OWN, *TYPED)]
    return assembled(models.Unigram(pieces, unk_id=0), normalizer, pre)


def assembled(model: Any, normalizer: Any, pre: Any) -> Any:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if isinstance(pre, pre_tokenizers.Sequence):
        tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
SPACES = normalizers.Replace(" ", "▁")
KINDS = {
    "bytes": lambda: assembled(
        models.BPE(
            {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]
        ),
        normalizers.NFC(),
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\s+|\w+|[^\s\w]+"), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    ),
    "prepended": lambda: bpe(PREPEND, None),
    "spaces": lambda: bpe(SPACES, None),
    "metaspace first": lambda: bpe(None, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "metaspace always": lambda: bpe(None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "unigram": lambda: unigram(normalizers.NFKC(), pre_tokenizers.Metaspace()),
    "vocabulary": lambda: bpe(SPACES, None, (*TYPED, *OWN, "the")),
}
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "strips": {"lstrip": True, "rstrip": True},
    "normalized": {"normalized": True},
}


def with_added(tokenizer: Any, texts: Sequence[str], flags: dict[str, Any]) -> Any:
    for text in texts:
        tokenizer.add_tokens([flagged(text, **flags)])
    return tokenizer


@cache
def made_of(kind: str, *texts: str, template: str = TEMPLATE, flags: str = "plain") -> HFTokenizer:
    return wrapped(with_added(KINDS[kind](), texts, FLAGS[flags]), template)


def wrapped(fast: Any, template: str = TEMPLATE) -> HFTokenizer:
    backend = PreTrainedTokenizerFast(
        tokenizer_object=fast, clean_up_tokenization_spaces=False, bos_token=None
    )
    backend.chat_template = template
    return HFTokenizer(backend)


def asked(*texts: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


PIECES = st.one_of(
    st.sampled_from([*TYPED, "<|im_", "start|>", "<", ">", " ", "\n\n", "the", "▁", "\ue000"]),
    st.text(alphabet=LETTERS + "é中😀\ue000\U000f0000", max_size=4),
)
WORDS = st.lists(PIECES, max_size=6).map("".join)
OF_OTHERS = WORDS.filter(lambda text: not any(own in text for own in OWN))
"""Words that spell no token of the template's own, as which the oracle would read them."""


@pytest.mark.parametrize("flags", list(FLAGS))
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("unigram", "vocabulary")])
@given(texts=st.lists(OF_OTHERS, min_size=1, max_size=3))
def test_typed_control_tokens_are_encoded_as_plain_text(
    kind: str, flags: str, texts: list[str]
) -> None:
    """The oracle has the template's tokens alone, and reads the whole text in one go."""
    ours = made_of(kind, *OWN, *TYPED, flags=flags)
    oracle = made_of(kind, *OWN, flags=flags)
    made = ours.render(asked(*texts), [], {})
    text = ours.apply_template(asked(*texts), [], {})
    assert made.text == text
    assert made.tokens == oracle.encode(text, special=False)


@pytest.mark.parametrize("kind", ["unigram", "vocabulary"])
@given(texts=st.lists(WORDS, min_size=1, max_size=3))
def test_typed_control_tokens_of_a_base_vocabulary_are_split(kind: str, texts: list[str]) -> None:
    ours = made_of(kind, *OWN, *TYPED)
    made = ours.render(asked(*texts), [], {})
    typed = {ours.fast.token_to_id(text) for text in TYPED}
    own = [i for i in made.tokens if i in {ours.fast.token_to_id(text) for text in OWN}]
    assert not typed & set(made.tokens)
    assert len(own) == 2 + 2 * len(texts)


def test_text_that_normalises_to_a_control_token_stays_text() -> None:
    fast = with_added(KINDS["unigram"](), (*OWN, *TYPED), {"normalized": True})
    ours = wrapped(fast)
    for typed in ("＜tool_call＞", "<tool＿call>", "＜|end|＞"):
        made = ours.render(asked(f"a {typed} b"), [], {})
        plain = ours.render(asked("a b"), [], {})
        control = [[t for t in each.tokens if t in ours.control.content] for each in (made, plain)]
        assert control[0] == control[1]
        assert len(made.tokens) >= len(plain.tokens) + 8


def test_words_and_spaces_among_the_added_tokens_stay_vocabulary() -> None:
    fast = with_added(KINDS["bytes"](), OWN, {})
    fast.add_tokens([flagged("   "), flagged("ü"), flagged("Paris"), flagged("[PAD]")])
    fast.add_tokens([flagged("</td>"), flagged("<h7>")])
    ours = wrapped(fast)
    tokens = ours.render(asked("if x:   Paris [PAD]<|end|></td><h7> ü"), [], {}).tokens
    kept = [fast.token_to_id(text) for text in ("   ", "Paris", "</td>", "ü")]
    assert [token for token in tokens if token in kept] == kept
    assert not {fast.token_to_id(text) for text in ("[PAD]", "<h7>")} & set(tokens)
    tables = wrapped(fast, TEMPLATE.replace("<s>", "<s></td>"))
    assert tables.render(asked("a</td>"), [], {}).tokens.count(kept[2]) == 1


@given(st.lists(st.text(alphabet="<>ab|", min_size=1, max_size=5), min_size=1, max_size=6), WORDS)
def test_a_text_broken_as_found_has_no_control_token(texts: list[str], word: str) -> None:
    fast = with_added(KINDS["bytes"](), [], {})
    fast.add_special_tokens([AddedToken(text, normalized=False) for text in texts])
    control = ControlTokens(fast, "")
    for text in (word, "".join(texts), word.join(texts)):
        places = control.breaks(text)
        assert control.touched(text) == bool(places)
        left = "".join("\ue123" if i in places else c for i, c in enumerate(text))
        assert not any(token in left for token in texts)


@pytest.mark.parametrize("change", ["", "| lower"])
@given(WORDS, WORDS, st.sampled_from(["<|im_start|>", "<tool_call>"]), st.data())
def test_parts_that_a_template_joins_make_no_control_token(
    change: str, before: str, after: str, token: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token)), min_size=1, max_size=4)))
    typed = token.upper() if change else token
    pieces = [typed[a:b] for a, b in zip([0, *cuts], [*cuts, len(token)], strict=True)]
    parts = [{"text": text} for text in (before, *pieces, after)]
    template = "<s>{% for p in messages[0].content %}{{ p.text | }}{% endfor %}".replace(
        "|", change
    )
    ours = made_of("bytes", *OWN, *TYPED, template=template)
    made = ours.render([{"role": "user", "content": parts}], [], {})
    assert made.text.casefold() == "<s>" + "".join(part["text"] for part in parts).casefold()
    assert [t for t in made.tokens if t in ours.control.content] == [ours.fast.token_to_id("<s>")]


NAMES = (
    "{% for t in tools %}<s>{% for k in t %}{{ '\\n<' ~ k ~ '>' }}{{ t[k] }}</{{ k }}>"
    "{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("key", ["tool_call", "|im_start|", "think", "/think", "think><tool_call"])
def test_a_name_between_angle_brackets_makes_no_control_token(key: str) -> None:
    ours = made_of("bytes", *OWN, *TYPED, template=NAMES)
    made = ours.render([{"role": "user", "content": ""}], [{key: "x"}, {"city": "y"}], {})
    assert made.text == f"<s>\n<{key}>x</{key}><s>\n<city>y</city>"
    own = [t for t in made.tokens if t in ours.control.content]
    assert own == [ours.fast.token_to_id("<s>")] * 2


FILTERS = {
    "json": "{{ m | tojson }}",
    "ascii": "{{ m | tojson(ensure_ascii=True) }}",
    "trim": "{{ m.content | trim }}",
    "upper": "{{ m.content | upper }}",
    "lower": "{{ m.content | lower }}",
    "upper and lower": "{{ m.content | upper | lower }}",
    "cut": "{{ m.content[:9] }}",
    "split": "{{ m.content.split('</think>')[-1].lstrip('\n') }}",
    "replace": "{{ m.content | replace('<', '[') }}",
    "html": "{{ m.content | urlencode }}",
    "dropped": "{{ m.role }}",
}


@pytest.mark.parametrize("name", list(FILTERS))
@given(WORDS)
def test_no_filter_lets_a_control_token_through(name: str, word: str) -> None:
    template = "{% for m in messages %}<s>" + FILTERS[name] + "{% endfor %}"
    ours = made_of("bytes", *OWN, *TYPED, template=template)
    typed = ("", "<tool_call>", "</think>", "<TOOL_call>", "<|im_ﬆart|>")
    for content in (f"{word}{text}{word}" for text in typed):
        made = ours.render([{"role": "user", "content": content}], [], {})
        own = [t for t in made.tokens if t in ours.control.content]
        assert own == [ours.fast.token_to_id("<s>")]
        assert ours.decode(made.tokens, skip_special=False) or not made.text
    if name in ("json", "ascii", "trim", "upper", "dropped"):
        plain = ours.apply_template([{"role": "user", "content": word}], [], {})
        assert ours.render([{"role": "user", "content": word}], [], {}).text == plain


SWITCHES = (
    "{{ m.content | replace('/think', '') }}",
    "{{ m.content.replace('/no_think', '').replace( '/think', '').rstrip() }}",
    "{{ m.content.split('/think') | join }}",
    "{{ (m.content | upper).replace('/THINK', '') | lower }}",
)


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize(
    "typed", ["<|im_/thinkstart|>", "a </think/think> b", "<tool/th/thinkink_call>", "</think<"]
)
def test_text_around_a_part_that_a_template_removes_joins_no_control_token(
    switch: str, typed: str
) -> None:
    template = f"{{% for m in messages %}}<s>{switch}{{% endfor %}}"
    ours = made_of("bytes", *OWN, *TYPED, template=template)
    made = ours.render(asked(typed), [], {})
    whole = ours.apply_template(asked(typed), [], {})
    assert made.text == whole
    own = [t for t in made.tokens if t in ours.control.content]
    assert own == [ours.fast.token_to_id("<s>")]
    plain = ours.render(asked("1 < 2 and <|x"), [], {})
    assert plain.tokens == ours.encode("<s>1 < 2 and <|x", special=False)


def test_a_tag_that_the_template_opens_or_closes_is_a_control_token() -> None:
    tags = ("<s>", "</s>", "<b>", "</b>")
    ours = made_of("bytes", *tags, template="{{ '<s>' }}{{ messages[0].content }}")
    assert {*ours.control.content.values()} == {"<s>", "</s>"}


def test_a_template_that_drops_private_characters_gets_unicode_escapes() -> None:
    template = (
        "{% for m in messages %}<s>{{ m.content.encode('ascii', 'ignore').decode() }}{% endfor %}"
    )
    ours = made_of("bytes", *OWN, *TYPED, template=template)
    made = ours.render(asked("call <tool_call> it"), [], {})
    assert made.text == "<s>call \\u003ctool_call> it"


def test_a_field_that_loses_its_marks_is_escaped_in_that_request() -> None:
    template = (
        "{% for m in messages %}<s>{% if m.name %}"
        "{{ m.name.encode('ascii', 'ignore').decode() }}: {% endif %}{{ m.content }}{% endfor %}"
    )
    ours = made_of("bytes", *OWN, *TYPED, template=template)
    message = {"role": "user", "name": "<tool_call>", "content": "hi"}
    assert ours.render([message], [], {}).text == "<s>\\u003ctool_call>: hi"


def test_a_client_that_sends_private_characters_keeps_them() -> None:
    ours = made_of("bytes", *OWN, *TYPED)
    crowd = "".join(map(chr, range(0xE000, 0xF900)))
    for text in ("\ue000 <tool_call>", crowd + "<tool_call>", r"\ue000 <tool_call> \\ue001"):
        made = ours.render(asked(text), [], {})
        assert text in made.text
        assert text in ours.decode(made.tokens, skip_special=False)
        assert ours.fast.token_to_id("<tool_call>") not in made.tokens


def test_key_names_that_the_template_writes_may_be_control_tokens() -> None:
    fast = with_added(KINDS["bytes"](), ("<type>", "<think>", "<s>"), {})
    template = (
        "{% for t in tools %}<s>{% for k in t %}<{{ k }}>{% endfor %}"
        "{% if t.type == 'function' %}!{% endif %}{% endfor %}"
    )
    ours = wrapped(fast, template)
    tool = {"type": "function", "think": "x"}
    made = ours.render([{"role": "user", "content": ""}], [tool], {})
    assert made.text == "<s><type><think>!"
    own = [fast.id_to_token(t) for t in made.tokens if t in ours.control.content]
    assert own == ["<s>", "<type>"]


def test_checkpoints_stand_at_the_ends_of_messages() -> None:
    for kind in ("bytes", "prepended", "metaspace first"):
        ours = made_of(kind, *OWN, *TYPED)
        texts = ("one <tool_call> </think>", "two <|im_start|>", "three <tool_call>")
        made = ours.render(asked(*texts), [], {})
        end = ours.fast.token_to_id("<|end|>")
        ends = [i + 1 for i, token in enumerate(made.tokens) if token == end]
        newline = len(ours.encode_with_offsets("<|end|>\n<s>", Hidden((), (), {})).ids) - 2
        assert made.snapshot_points == tuple(i + newline for i in ends)


def test_in_a_continued_text_only_the_markup_of_the_engine_is_control_tokens() -> None:
    ours = made_of("bytes", *OWN, *TYPED)
    close, call = (ours.fast.token_to_id(text) for text in ("</think>", "<tool_call>"))
    tokens = ours.encode_plain("so </think> <tool_call>", before="\n</think>\n\n")
    assert tokens.count(close) == 1
    assert call not in tokens
    assert ours.decode(tokens) == "\n</think>\n\nso </think> <tool_call>"
    assert ours.encode_plain("so") == ours.encode("so", special=False)


@pytest.mark.parametrize("text", ["<|end|>" * 100_000, r"<|end|>" + r"\u0041" * 100_000])
def test_a_text_of_nothing_but_control_tokens_takes_a_few_times_its_size(text: str) -> None:
    control = made_of("bytes", *OWN).control
    typed = Hidden([{"role": "user", "content": text}], (), {})
    assert hide(control, typed).marks
    tracemalloc.start()
    hide(control, typed)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * len(text)

"""Normalisation: published cases, recorded client bodies, and properties over any conversation."""

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_provider.chat.messages.normalise import MediaSupport, Normalised, normalise
from mlx_provider.chat.messages.tools_as_text import write_as_text
from mlx_provider.chat.messages.turns import NO_RESULT
from mlx_provider.errors import BadRequest

DATA = Path(__file__).parents[1] / "data" / "chat"
CASES = [json.loads(line) for line in (DATA / "normalize.jsonl").read_text().splitlines()]
CLIENTS = json.loads((DATA / "client_messages.json").read_text())


def user_turn(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def image_part(source: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": source}


IMAGE = image_part({"url": "data:,"})


def canonical(message: dict[str, Any]) -> dict[str, Any]:
    """An expected message of a case in the form that templates take."""
    message = copy.deepcopy(message)
    if isinstance(message.get("content"), list):
        kinds = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
        message["content"] = [
            part if part["type"] == "text" else {"type": kinds.get(part["type"], part["type"])}
            for part in message["content"]
        ]
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            call["function"]["arguments"] = json.loads(arguments)
    return message


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_a_published_case_is_normalised_as_expected(case: dict[str, Any]) -> None:
    before = copy.deepcopy(case["messages"])
    done = normalise(case["messages"], hoist_system=case["kind"].startswith("hoist"))
    assert case["messages"] == before
    if "expected_messages" in case:
        assert done.messages == [canonical(m) for m in case["expected_messages"]]
    for key, expected in case.get("expected_media", {}).items():
        found: list[Any] = [ref.source for ref in done.media if f"{ref.kind}s" == key]
        if key == "text":
            found = [p["text"] for p in done.messages[0]["content"] if p["type"] == "text"]
        assert found == expected
    if "expected_part_types" in case:
        types = [part["type"] for part in done.messages[0]["content"]]
        assert types == case["expected_part_types"]


def client(name: str, **options: bool) -> Normalised:
    return normalise(CLIENTS[name], **{"hoist_system": False, **options})


def roles(done: Normalised) -> list[str]:
    return [message["role"] for message in done.messages]


def test_late_system_message_becomes_user_text_in_place() -> None:
    done = client("01")
    assert roles(done) == ["system", "user", "assistant", "tool", "user"]
    assert done.messages[0]["content"].endswith("</env>")
    assert done.messages[1]["content"] == "Fix add() in calc.py\n\n(also run the tests)"
    assert done.messages[4]["content"].startswith("<system-reminder>plan mode")
    assert done.messages[4]["content"].endswith("\n\ngo on")


def test_late_system_message_is_hoisted_where_the_template_refuses_it() -> None:
    done = client("01", hoist_system=True)
    assert roles(done) == ["system", "user", "assistant", "tool", "user"]
    assert done.messages[0]["content"].endswith("you may edit files</system-reminder>")
    assert done.messages[4]["content"] == "go on"


def test_appending_a_turn_keeps_the_head() -> None:
    head = CLIENTS["01"][:6]
    assert normalise(head, hoist_system=False).messages == client("01").messages[:4]


def test_developer_messages_of_codex_are_one_system_message() -> None:
    done = client("02")
    assert roles(done) == ["system", "user", "assistant", "tool", "tool"]
    assert "<skills_instructions>" in done.messages[0]["content"]
    assert done.messages[2]["reasoning_content"] == "I should list files."
    assert done.messages[2]["content"] is None
    assert [m["tool_call_id"] for m in done.messages[3:]] == ["call_1", "call_2"]


def test_billing_line_of_claude_code_does_not_reach_the_prompt() -> None:
    done = client("03")
    assert done.messages[0]["content"].startswith("You are Claude Code.\n\nYou are a coding agent")
    other = copy.deepcopy(CLIENTS["03"])
    other[0]["content"][0]["text"] = "x-anthropic-billing-header: cc_version=9.9.0cf;"
    assert normalise(other, hoist_system=False) == done


def test_billing_line_at_the_head_of_a_string_is_removed() -> None:
    text = "x-anthropic-billing-header: cc_version=1;\nBe kind."
    done = normalise([{"role": "system", "content": text}, user_turn(text)], hoist_system=False)
    assert [m["content"] for m in done.messages] == ["Be kind.", text]


def test_thoughts_of_claude_code_are_kept_once() -> None:
    turn = client("03").messages[3 - 1]
    assert turn["reasoning_content"] == "I need the picture and the tests."
    assert "thinking_blocks" not in turn
    blocks = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in CLIENTS["03"]]
    assert normalise(blocks, hoist_system=False) == client("03")


def test_image_of_a_tool_result_moves_behind_the_results() -> None:
    done = client("03")
    assert roles(done) == ["system", "user", "assistant", "tool", "tool", "user", "user"]
    assert done.messages[3]["content"] == "[image in the next message]"
    assert done.messages[5]["content"] == [
        {"type": "text", "text": "Attached to the tool result toolu_01"},
        {"type": "image"},
    ]
    assert done.media[0].path == "messages[4].content[0]"


def test_image_of_a_tool_result_stays_where_the_template_shows_it() -> None:
    done = client("04", tool_media=True)
    assert done.messages[5]["content"] == [
        {"type": "text", "text": "screenshot:"},
        {"type": "image"},
    ]
    assert done.messages[6] == {"role": "tool", "content": "", "tool_call_id": "c_orphan"}


def test_tool_calls_and_results_in_every_spelling_are_normalised() -> None:
    done = client("04")
    calls = [call["function"]["arguments"] for call in done.messages[2]["tool_calls"]]
    assert calls == [{"filePath": "a.py"}, {"filePath": "b.py", "limit": None}, {}]
    assert done.messages[4]["content"] == "B = 2\n\n\n# end"
    assert [m.get("tool_call_id") for m in done.messages[3:7]] == ["c1", "c2", "c3", "c_orphan"]
    assert done.messages[-1]["content"].startswith("Thanks. Emoji check: 👩‍🚀")


def test_strict_templates_get_alternating_turns() -> None:
    done = client("03", alternate=True, hoist_system=True)
    assert roles(done) == ["system", "user", "assistant", "tool", "tool", "user"]
    assert [part["type"] for part in done.messages[-1]["content"]] == ["text", "image", "text"]


def test_alternating_turns_keep_the_blank_line_between_texts() -> None:
    turns = [user_turn([IMAGE, {"type": "text", "text": "a"}]), user_turn("b")]
    done = normalise(turns, hoist_system=False, alternate=True)
    assert done.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "a\n\nb"}]


def test_images_in_every_spelling_become_image_parts() -> None:
    done = client("05")
    assert [part["type"] for part in done.messages[0]["content"]] == [
        "text", "image", "image", "image", "image", "image", "image", "text",
    ]  # fmt: skip
    sources = [str(ref.source) for ref in done.media]
    assert [source.split(":")[0] for source in sources] == [
        "data", "data", "http", "file", "data", "data",
    ]  # fmt: skip
    assert [ref.detail for ref in done.media] == ["low", *["auto"] * 5]
    assert sources[5] == sources[1]


def test_a_list_of_frames_becomes_one_video_part() -> None:
    video = {"type": "video", "video": ["data:,a", image_part({"url": "data:,b"})]}
    done = normalise([user_turn([video])], hoist_system=False)
    assert done.media[0].source == ("data:,a", "data:,b")
    assert done.messages == [user_turn([{"type": "video"}])]


def calling(*ids: Any, content: Any = None, names: str = "ffffff") -> dict[str, Any]:
    named = zip(ids, names, strict=False)
    calls = [{"id": i, "function": {"name": n, "arguments": "{}"}} for i, n in named]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(call_id: str | None, content: Any, **more: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id, **more}


USER = user_turn("go on")
RESULTS: dict[str, tuple[list[Any], str]] = {
    "in another order": ([calling(*"abc"), result("c", "C"), result("a", "A"), result("b", "B")],
                         "abc A B C"),
    "of an interrupted turn": ([calling(*"ab"), result("b", "B"), USER], "ab - B user"),
    "none at all": ([calling(*"ab"), USER], "ab - - user"),
    "not yet": ([USER, calling(*"ab")], "user ab"),
    "after the user": ([calling(*"ab"), result("b", "B"), USER, result("a", "A")], "ab A B user"),
    "after another turn": (
        [calling("a"), USER, calling("b", content="x"), result("a", "A"), result("b", "B")],
        "a A user b B"),
    "ids that begin again": (
        [calling(*"ab"), result("b", "B"), USER, calling(*"ab"), result("b", "D"),
         result("a", "C")], "ab - B user ab C D"),
    "one id for two": ([calling("a", "a"), result("a", "A"), result("a", "B")], "aa A B"),
    "two of one": ([calling(*"ab"), result("a", "A"), result("a", "C"), result("b", "B")],
                   "ab A/C B"),
    "unknown ids": ([calling(*"ab"), result("y", "A"), result("x", "B")], "ab A B"),
    "one unknown id": ([calling(*"abc"), result("c", "C"), result("x", "A"), result("b", "B")],
                       "abc A B C"),
    "one of no call": ([calling(*"ab"), result("x", "X"), result("b", "B"), result("a", "A")],
                       "ab A B X"),
    "before all calls": ([result("a", "X"), calling("a"), result("a", "A")], "X a A"),
    "no ids": ([calling(None, None), result(None, "A"), result(None, "B")], "?? A B"),
    "ids of some": ([calling(*"ab"), result(None, "B"), result("a", "A")], "ab A B"),
    "functions in place of ids": (
        [calling(None, None, names="fg"), result(None, "B", name="g"), result(None, "A", name="f")],
        "?? A B"),
    "numbers as ids": ([calling(1, 2), result("2", "B"), result("1", "A")], "12 A B"),
    "of two turns": ([calling("a"), calling("b"), result("b", "B"), result("a", "A")], "a A b B"),
}  # fmt: skip


@pytest.mark.parametrize("case", RESULTS)
def test_results_follow_their_calls_in_order(case: str) -> None:
    sent, expected = RESULTS[case]
    done = normalise(sent, hoist_system=False)
    shown = []
    for message in done.messages:
        text = {"go on": "user", NO_RESULT: "-"}.get(message["content"], message["content"])
        calls = message.get("tool_calls")
        shown.append("".join(str(c.get("id", "?")) for c in calls) if calls else text)
    assert " ".join(each.replace("\n\n", "/") for each in shown) == expected
    assert len(done.warnings) == expected.count("-")
    if done.warnings:
        at = sent.index(calling(*"ab"))
        assert done.warnings[0].startswith(f"messages[{at}].tool_calls[0] has no result")


def test_images_of_results_follow_in_the_order_of_the_calls() -> None:
    sent = [calling(*"ab"), result("b", [IMAGE, "B"]), result("a", [IMAGE])]
    done = normalise(sent, hoist_system=False)
    assert [ref.path for ref in done.media] == ["messages[2].content[0]", "messages[1].content[0]"]
    texts = [part.get("text") for part in done.messages[-1]["content"]]
    assert texts == ["Attached to the tool result a", None, "Attached to the tool result b", None]


def test_results_as_text_are_named_by_their_calls() -> None:
    sent = [calling(*"ab", names="fg"), result("b", "B"), result("a", "A"), USER]
    told = write_as_text(normalise(sent, hoist_system=False).messages)[-1]
    parts = ["Result of call 1, f:", "A", "Result of call 2, g:", "B", "go on"]
    assert told == {"role": "user", "content": "\n\n".join(parts)}


def test_joined_turns_as_text_keep_the_reasoning_of_both() -> None:
    turns = [{"role": "assistant", "content": text, "reasoning_content": text} for text in "ab"]
    (joined,) = write_as_text([{"role": "assistant", "content": "c"}, *turns])
    assert (joined["content"], joined["reasoning_content"]) == ("c\n\na\n\nb", "a\n\nb")


def test_malformed_arguments_are_kept_as_a_text_value() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": '}}
    done = normalise([{"role": "assistant", "tool_calls": [call]}], hoist_system=False)
    assert done.messages[0]["tool_calls"][0]["function"]["arguments"] == {"value": '{"a": '}
    assert done.messages[0]["content"] is None


@pytest.mark.parametrize("text", ["a\nb", '{"a": 1}', "[0,1]"])
def test_a_custom_call_of_another_server_is_kept(text: str) -> None:
    """As it was written: nobody has counted the values of a JSON text in it."""
    custom = {"name": "patch", "input": text}
    call = {"id": "c", "type": "custom", "custom": custom, "function": None}
    done = normalise([{"role": "assistant", "tool_calls": [call]}], hoist_system=False)
    function = done.messages[0]["tool_calls"][0]["function"]
    assert function == {"name": "patch", "arguments": {"value": text}}


def test_older_function_messages_become_tool_calls_and_results() -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}}
    sent = [call, {"role": "function", "name": "f", "content": "4"}]
    done = normalise(sent, hoist_system=False)
    function = {"name": "f", "arguments": {}}
    assert done.messages[0]["tool_calls"] == [{"type": "function", "function": function}]
    assert done.messages[1] == {"role": "tool", "content": "4", "name": "f"}


def test_tool_reference_becomes_text() -> None:
    parts = [{"type": "tool_reference", "tool_name": "WebFetch"}]
    done = normalise([{"role": "tool", "tool_call_id": "c", "content": parts}], hoist_system=False)
    assert done.messages[0]["content"] == "[tool: WebFetch]"


REFUSED: list[tuple[Any, str]] = [
    ([], "messages"),
    ("hello", "messages"),
    (["hello"], "messages[0]"),
    ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([user_turn(3)], "messages[0].content"),
    ([user_turn([3])], "messages[0].content[0]"),
    ([user_turn([{"type": "text", "text": 3}])], "messages[0].content[0]"),
    ([user_turn([{"type": "file", "file": {}}])], "messages[0].content[0]"),
    ([user_turn([{"type": ["text"]}])], "messages[0].content[0]"),
    ([user_turn([{"type": "input_image", "file_id": "f"}])], "messages[0].content[0]"),
    ([user_turn([image_part({})])], "messages[0].content[0]"),
    ([user_turn([image_part(7)])], "messages[0].content[0]"),
    ([user_turn([image_part({"url": "data:,", "detail": "best"})])], "messages[0].content[0]"),
    ([user_turn([image_part({"url": "data:,", "detail": ["low"]})])], "messages[0].content[0]"),
    ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], "messages[0].tool_calls[0]"),
    ([{"role": "user", "content": "x", "name": 3}], "messages[0].name"),
]


@pytest.mark.parametrize(("messages", "param"), REFUSED)
def test_refusal_names_the_part(messages: Any, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        normalise(messages, hoist_system=False)
    assert refused.value.param == param
    assert param.split("[", maxsplit=1)[0] in refused.value.message


def test_audio_is_replaced_by_a_note_for_every_model() -> None:
    audio = [{"type": "input_audio", "input_audio": {"data": "abc", "format": "wav"}}]
    sees = frozenset({"image", "video"})
    done = normalise([user_turn(audio)], hoist_system=False, support=MediaSupport(sees))
    assert done.messages[0]["content"] == "[audio omitted: this model cannot take it]"


@pytest.mark.parametrize("tool_media", [True, False])
@pytest.mark.parametrize("name", ["04", "05"])
def test_text_model_reads_on_past_images_of_users_and_tools(name: str, tool_media: bool) -> None:
    seen = client(name, tool_media=tool_media)
    done = client(name, tool_media=tool_media, support=MediaSupport(frozenset()))
    assert done.media == ()
    assert len(done.warnings) == len(seen.media) > 0
    shown = [m["content"] for m in done.messages]
    assert sum(str(text).count("[image omitted") for text in shown) == len(seen.media)
    assert not any(isinstance(content, list) for content in shown)
    assert roles(done) == [m["role"] for m in CLIENTS[name]], "nothing moved to another message"


def test_only_media_of_unsupported_kinds_are_left_out_with_a_warning() -> None:
    frames = {"type": "video_url", "video_url": ["data:,a"]}
    sent = [user_turn([IMAGE, frames, IMAGE])]
    done = normalise(sent, hoist_system=False, support=MediaSupport(frozenset({"image"})))
    kinds = [part["type"] for part in done.messages[0]["content"]]
    assert kinds == ["image", "text", "image"]
    assert [ref.path for ref in done.media] == ["messages[0].content[0]", "messages[0].content[2]"]
    assert done.warnings == ("messages[0].content[1]: video omitted, this model cannot take it",)


def test_supported_media_leave_the_messages_unchanged() -> None:
    assert client("04", support=MediaSupport(frozenset({"image"}))) == client("04")


TURNS: list[tuple[list[tuple[str, Any]], list[tuple[str, Any]]]] = [
    ([("user", [IMAGE]), ("user", "a")], [("user", [{"type": "image"}, "a"])]),
    ([("user", "a"), ("user", [IMAGE])], [("user", ["a", {"type": "image"}])]),
    (
        [("user", "a"), ("assistant", "b"), ("assistant", "c"), ("user", "d")],
        [("user", "a"), ("assistant", "b\n\nc"), ("user", "d")],
    ),
    ([("system", "s"), ("user", "a")], [("user", "s\n\na")]),
    ([("system", "s"), ("user", [IMAGE])], [("user", ["s", {"type": "image"}])]),
    ([("system", "s"), ("user", "a"), ("system", "t")], [("user", "s\n\na\n\nt")]),
    (
        [("system", "s"), ("assistant", "b"), ("user", "a")],
        [("user", "s"), ("assistant", "b"), ("user", "a")],
    ),
    ([("assistant", "b"), ("user", "a")], [("user", ""), ("assistant", "b"), ("user", "a")]),
    ([("system", "s")], [("user", "s")]),
]


@pytest.mark.parametrize(("sent", "expected"), TURNS)
def test_templates_without_a_system_role_and_with_strict_turns(sent: Any, expected: Any) -> None:
    options = {"hoist_system": False, "system_role": False, "alternate": True}
    done = normalise([{"role": r, "content": c} for r, c in sent], **options)
    shown = [
        (m["role"], m["content"] if isinstance(m["content"], str) else shortened(m["content"]))
        for m in done.messages
    ]
    assert shown == expected
    assert normalise(done.messages, **options).messages == done.messages


def shortened(parts: list[dict[str, Any]]) -> list[Any]:
    return [part["text"] if part["type"] == "text" else part for part in parts]


texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
parts = st.one_of(
    texts,
    st.builds(lambda text: {"type": "text", "text": text}, texts),
    st.builds(lambda text: {"type": "input_text", "text": text}, texts),
    st.just({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}),
    st.just({"type": "tool_reference", "tool_name": "grep"}),
)
contents = st.one_of(st.none(), texts, st.lists(parts, max_size=4))
calls = st.lists(
    st.builds(
        lambda arguments: {"id": "c", "function": {"name": "f", "arguments": arguments}},
        st.one_of(st.none(), texts, st.just('{"a": [1]}'), st.dictionaries(texts, texts)),
    ),
    max_size=2,
)
turns = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
            "content": contents,
        },
        optional={
            "tool_calls": calls,
            "name": st.sampled_from(["a", "b"]),
            "tool_call_id": st.just("c"),
            "reasoning_content": texts,
        },
    ),
    min_size=1,
    max_size=7,
)


def plain_text(messages: list[dict[str, Any]]) -> str:
    found = []
    for message in messages:
        content = message.get("content") or ""
        for part in [content] if isinstance(content, str) else content:
            found.append(part if isinstance(part, str) else part.get("text", ""))
    return "".join("".join(found).split())


@given(turns, st.tuples(*[st.booleans()] * 4))
def test_normalising_twice_equals_once(messages: list[Any], template: tuple[bool, ...]) -> None:
    before = copy.deepcopy(messages)
    names = ("hoist_system", "alternate", "tool_media", "system_role")
    options = dict(zip(names, template, strict=True))
    done = normalise(messages, **options)
    assert messages == before
    assert normalise(done.messages, **options).messages == done.messages
    assert sum(m["role"] == "system" for m in done.messages[options["system_role"] :]) == 0
    shown = sum(
        part["type"] == "image"
        for m in done.messages
        if isinstance(m["content"], list)
        for part in m["content"]
    )
    assert shown == len(done.media) == str(before).count("data:image/png")
    given_text, kept_text = sorted(plain_text(before)), sorted(plain_text(done.messages))
    for letter in set(given_text):
        assert kept_text.count(letter) >= given_text.count(letter)
    assert sum(len(m.get("tool_calls", ())) for m in done.messages) == sum(
        len(m.get("tool_calls", ())) for m in before if m["role"] == "assistant"
    )
    waiting: list[Any] = []
    for message in done.messages:  # as many results as calls, unless only the assistant follows
        if message["role"] == "tool":
            waiting = waiting[1:]
        elif message["role"] != "assistant":
            assert waiting == []
        waiting = [*waiting, *message.get("tool_calls", ())]
    if options["alternate"]:
        pairs = zip(done.messages, done.messages[1:], strict=False)
        assert not any(a["role"] == b["role"] == "user" for a, b in pairs)


def test_normalised_messages_share_no_mapping_with_their_input() -> None:
    arguments = {"a": {"b": 1}}
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    done = normalise([{"role": "assistant", "tool_calls": [call]}], hoist_system=False)
    done.messages[0]["tool_calls"][0]["function"]["arguments"]["a"]["b"] = 2
    assert arguments == {"a": {"b": 1}}


def test_images_without_number_that_a_model_cannot_take_cost_linear_time() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    given = [{"role": "user", "content": [image] * 20_000}]
    began = time.thread_time()
    made = normalise(given, hoist_system=False, support=MediaSupport(frozenset()))
    assert time.thread_time() - began < 10, "each is looked up among all others"
    assert len(made.warnings) == 20_000

"""What submissions mean, and what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.batches.jobs import NewItem
from gateway.batches.native import may_be_batch, wants_queue
from gateway.batches.prefixes import places_of, prompt_text
from gateway.batches.submission import MAX_PROBLEMS, LineReader, decode_native, native_items
from gateway.errors import Refusal
from tests.support.batches import chat_item


def line(custom_id: Any = "r1", **changes: Any) -> bytes:
    fields = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": []},
    }
    return json.dumps(fields | changes).encode() + b"\n"


def read(*pieces: bytes, max_items: int = 100) -> LineReader:
    reader = LineReader("/v1/chat/completions", max_items)
    reader.read(pieces)
    return reader


class TestNative:
    @pytest.mark.parametrize(
        ("query", "expected"),
        [
            ("queueRequest=true", True),
            ("a=1&queueRequest=true", True),
            ("queueRequest=false", False),
            ("queueRequest=", False),
            ("notqueueRequest=true", False),
            ("", False),
        ],
    )
    def test_the_query_says_whether_to_queue(self, query: str, expected: bool) -> None:
        assert wants_queue(query) is expected

    def test_text_about_requests_is_not_worth_a_look(self) -> None:
        assert not may_be_batch(json.dumps({"prompt": 'say "requests" and "request_id"'}).encode())
        assert may_be_batch(b'{"request_id":"x"}')

    def test_references_are_kept_as_they_came(self) -> None:
        body = decode_native(
            json.dumps(
                {"requests": [{"external_reference": "a\u00e4"}, {"external_reference": 7}, {}, "text"]}
            ).encode()
        )
        assert body is not None
        references = [json.loads(item.reference) for item in native_items(body, 10)]
        assert references == ["a\u00e4", 7, None, None]

    def test_a_reference_of_many_bytes_is_refused_by_its_place(self) -> None:
        requests = [{"external_reference": 5}, {"external_reference": "x" * 2_000}]
        body = decode_native(json.dumps({"requests": requests}).encode())
        assert body is not None
        with pytest.raises(Refusal, match="/requests/1/external_reference"):
            native_items(body, 10)
        body = decode_native(json.dumps({"requests": requests[:1]}).encode())
        assert body is not None
        assert native_items(body, 10)[0].reference == b"5"

    @pytest.mark.parametrize("requests", [[], "text", 7, {}, [1, 2, 3]])
    def test_what_is_no_list_of_requests_is_refused(self, requests: Any) -> None:
        body = decode_native(json.dumps({"requests": requests}).encode())
        assert body is not None
        with pytest.raises(Refusal, match="/requests"):
            native_items(body, 2)

    def test_what_is_no_object_is_nothing(self) -> None:
        assert decode_native(b"[1]") is None
        assert decode_native(b"\xff{") is None


class TestLines:
    def test_lines_may_be_cut_anywhere(self) -> None:
        whole = line("a") + b"\n" + line("b") + line("c").strip()
        for cut in range(0, len(whole), 7):
            reader = read(whole[:cut], whole[cut:])
            assert [json.loads(item.reference) for item in reader.items] == ["a", "b", "c"]
            assert reader.problems == []
            assert reader.model == "m"

    def test_a_byte_order_mark_is_no_part_of_the_first_line(self) -> None:
        reader = read(b"\xef\xbb\xbf" + line("a") + line("b"))
        assert ([json.loads(item.reference) for item in reader.items], reader.problems) == (["a", "b"], [])

    @pytest.mark.parametrize(
        ("bad", "code", "param"),
        [
            (b"{nothing}\n", "invalid_json_line", None),
            (b'{"custom_id": "x"}\n', "invalid_request", None),
            (line(7), "invalid_request", None),
            (line("x", body={}), "invalid_request", None),
            (line("a"), "duplicate_custom_id", "custom_id"),
            (line("x" * 2_000), "invalid_request", "custom_id"),
            (line("x", method="GET"), "invalid_method", "method"),
            (line("x", url="/v1/embeddings"), "mismatched_url", "url"),
            (line("x", body={"model": "other"}), "mismatched_model", "body.model"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_line(self, bad: bytes, code: str, param: str | None) -> None:
        reader = read(line("a"), bad, line("c"))
        (problem,) = reader.problems
        assert (problem.code, problem.line, problem.param) == (code, 2, param)

    def test_an_empty_file_holds_no_requests(self) -> None:
        assert [problem.code for problem in read(b"\n\n").problems] == ["empty_file"]

    def test_too_many_lines(self) -> None:
        reader = read(*(line(f"r{number}") for number in range(5)), max_items=3)
        assert [(problem.code, problem.line) for problem in reader.problems] == [("too_many_requests", 4)]

    def test_so_many_problems_are_enough(self) -> None:
        assert len(read(b"no\n" * 1_000).problems) == MAX_PROBLEMS


class TestPrefixes:
    def test_tools_come_before_messages(self) -> None:
        body = json.dumps({"messages": [{"role": "user"}], "tools": [{"type": "function"}]}).encode()
        assert prompt_text(body).index(b"function") < prompt_text(body).index(b"user")

    def test_what_cannot_be_read_is_its_own_text(self) -> None:
        assert prompt_text(b"not json") == b"not json"
        assert prompt_text(b'{"text":["a"]}') == b'{"text":["a"]}'

    def test_a_shared_beginning_makes_a_group(self) -> None:
        long, short = "word " * 400, "word " * 10
        items: list[NewItem] = [
            chat_item("a", system=long),
            chat_item("b", system=long + "!"),
            chat_item("a", system=short),
            chat_item("b", system=short),
        ]
        places = places_of(items, 1024)
        assert places[0].group == places[1].group
        assert len({place.group for place in places}) == 3
        assert sorted(place.rank for place in places) == [0, 1, 2, 3]

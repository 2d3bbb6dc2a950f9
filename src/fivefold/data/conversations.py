"""Conversations → parts of a document, each an answer (its tokens are learnt) or not.

A record is {"prompt": …, "response": …}, joined as they are (put what separates them into them), or
{"messages": [{"role": …, "content": …}, …]}, written as ChatML, the format of Qwen and others:

    <|im_start|>user⏎ question <|im_end|>⏎ <|im_start|>assistant⏎ answer <|im_end|>⏎

The two marks are single tokens where the tokenizer has them, else text. Learnt are what an assistant says,
the mark that ends it, and the end-of-text token after the conversation.
"""

from typing import Any, NamedTuple

from fivefold.data.source import DataError

FIELDS = (("prompt", "response"), ("messages",))
START, END = "<|im_start|>", "<|im_end|>"
ASSISTANT = "assistant"


class Part(NamedTuple):
    """A stretch of a document. `marker`: one token where the tokenizer has such a one, text where not."""

    text: str
    answer: bool = False
    marker: bool = False


def conversation(place: str, record: dict[str, Any]) -> list[Part]:
    """The parts of a conversation, at least one of them an answer. Raises DataError with `place`."""
    if record.get("messages") is not None:
        return _messages(place, record["messages"])
    prompt, response = record.get("prompt"), record.get("response")
    if not isinstance(prompt, str) or not isinstance(response, str):
        raise DataError(
            f'{place}: a conversation needs "prompt" and "response" (both text) or "messages"; '
            "for documents of plain text set data.answers_only = false"
        )
    return [Part(prompt), Part(response, answer=True)]


def _messages(place: str, messages: object) -> list[Part]:
    parts: list[Part] = []
    for number, message in enumerate(messages if isinstance(messages, list) else [], start=1):
        role, content = (
            (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        )
        if not isinstance(role, str) or not role or not isinstance(content, str):
            raise DataError(f'{place}: message {number} needs "role" and "content", both text')
        answer = role == ASSISTANT
        parts += [
            Part(START, marker=True),
            Part(f"{role}\n"),
            Part(content, answer),
            Part(END, answer, marker=True),
            Part("\n"),
        ]
    if not any(part.answer for part in parts):
        raise DataError(f'{place}: "messages" holds no message with the role "{ASSISTANT}": nothing to learn')
    return parts

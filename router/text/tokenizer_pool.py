"""Tokenizes and detokenizes in a few threads. The library releases the GIL, so the event loop is not blocked."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenizers import Encoding, Tokenizer

from router.errors import Reason, RequestError, Violation
from router.text.chat_template import ChatTemplates
from router.validate.chat import ChatPrompt
from router.validate.prompt import IdsPrompt, Prompt, TextPrompt
from sluice.ring.checkpoint import Checkpoint, CheckpointError
from sluice.ring.errors import ErrorCode
from sluice.ring.params import TextParams
from sluice.ring.vocabulary import Vocabulary

ID_BYTES = 8
"""Estimated bytes of text per token id, for the limit on queued work."""

MAX_WAITING = 1024
"""Texts that are queued or in work; equals the default number of requests that may wait for admission."""
MAX_WAITING_BYTES = 64 << 20
"""Total size of these texts, which limits the memory that a flood of long prompts can take."""

INLINE_BYTES = 512
"""Text prompts up to this size are tokenized on the event loop: passing them to a thread would cost about as much."""

T = TypeVar("T")


class TokenizerPool:
    """The model's tokenizer and chat template. Raises CheckpointError if they cannot be read.

    At most MAX_WAITING texts with MAX_WAITING_BYTES in total are queued or in work. Beyond that, calls raise
    RequestError OVERLOADED.
    """

    def __init__(self, checkpoint: Checkpoint, threads: int, max_rendered_bytes: int) -> None:
        self._tokenizer = _load(checkpoint)
        vision = checkpoint.vision
        image = "" if vision is None else str(self._tokenizer.id_to_token(vision.token_id))
        self._templates = ChatTemplates(
            checkpoint.chat_template,
            checkpoint.tool_use_template,
            checkpoint.tokenizer_config,
            max_rendered_bytes,
            image,
        )
        self._max_rendered_bytes = max_rendered_bytes
        self._waiting = self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self.vocabulary = Vocabulary(self._tokenizer)

    @property
    def shows_tools(self) -> bool:
        """Whether the model's chat template uses the tools of a chat."""
        return self._templates.show_tools

    def num_tokens_beyond(self, vocab_size: int) -> int:
        """Number of the tokenizer's tokens whose ids are not in a vocabulary of this size."""
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        return sum(number >= vocab_size for number in ids)

    async def tokens(self, prompt: Prompt) -> list[int]:
        """Token ids of the whole prompt, before truncation. Raises RequestError."""
        if isinstance(prompt, IdsPrompt):
            return list(prompt.ids)
        if isinstance(prompt, TextPrompt) and prompt.size <= INLINE_BYTES:
            return _guarded(lambda: self._encode_prompt(prompt))
        return await self._run(prompt.size, lambda: self._encode_prompt(prompt))

    async def spellings(self, words: Sequence[str]) -> list[list[list[int]]]:
        """For each word: its token ids at the start of a text, after a space, and within a text without a space before
        it. The first may equal the second (SentencePiece prepends a space to texts) or the last (byte-level BPE)."""
        if not words:
            return []
        return await self._run(3 * sum(len(word.encode()) + 1 for word in words), lambda: self._spell(words))

    async def encode(self, text: str, add_special_tokens: bool, into: Callable[[Encoding], T]) -> T:
        """`into(encoding)`, which is also called in the thread, since a text may have millions of tokens."""
        encode = self._tokenizer.encode
        return await self._run(len(text.encode()), lambda: into(encode(text, add_special_tokens=add_special_tokens)))

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of token ids. Invalid UTF-8 becomes U+FFFD."""
        tokens, decode = list(ids), self._tokenizer.decode
        size = ID_BYTES * len(tokens)
        return await self._run(size, lambda: str(decode(tokens, skip_special_tokens=skip_special_tokens)))

    async def prompt_text(self, ids: Sequence[int], text: TextParams) -> str:
        """The text of a prompt that precedes the text of an output."""
        skip, keep = text.skip_special_tokens, text.keep_special_tokens
        return await self._run(ID_BYTES * len(ids), lambda: self.vocabulary.prompt_text(ids, skip, keep))

    async def compute(self, size: int, work: Callable[[], T]) -> T:
        """`work()`, run in a thread; it need not process text. `size`: bytes of its input."""
        return await self._run(size, work)

    def close(self) -> None:
        """Stop the threads and drop queued work."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _spell(self, words: Sequence[str]) -> list[list[list[int]]]:
        def ids(text: str) -> list[int]:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

        line_break = ids("\n")
        result = []
        for word in words:
            spellings = [ids(word), ids(f" {word}")]
            within = ids(f"\n{word}")
            if within[: len(line_break)] == line_break and len(within) > len(line_break):
                spellings.append(within[len(line_break) :])
            result.append(spellings)
        return result

    def _encode_prompt(self, prompt: TextPrompt | ChatPrompt) -> list[int]:
        text = self._render(prompt) if isinstance(prompt, ChatPrompt) else prompt.text
        return list(self._tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens).ids)

    def _render(self, chat: ChatPrompt) -> str:
        text = self._templates.render(chat)
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > self._max_rendered_bytes:
            description = f"is {size} bytes when rendered, at most {self._max_rendered_bytes} are allowed"
            raise RequestError.invalid([Violation(chat.field, description, reason=Reason.TOO_MANY)])
        return text

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        """Run `work()` in a thread. `size`: bytes of its input. Raises RequestError OVERLOADED."""
        with self._lock:
            if self._waiting >= MAX_WAITING:
                message = f"{self._waiting} texts are being tokenized or decoded, at most {MAX_WAITING} are allowed"
                raise RequestError(ErrorCode.OVERLOADED, message)
            # A single text may exceed the limit; otherwise it could never be tokenized.
            if self._waiting and self._waiting_bytes + size > MAX_WAITING_BYTES:
                message = (
                    f"texts of {self._waiting_bytes} bytes are being tokenized or decoded and this one has {size}; "
                    f"at most {MAX_WAITING_BYTES} are allowed"
                )
                raise RequestError(ErrorCode.OVERLOADED, message)
            self._waiting += 1
            self._waiting_bytes += size
        future = self._threads.submit(_guarded, work)
        # Count it until the work ends: the thread continues even if the caller is cancelled.
        future.add_done_callback(lambda _: self._done(size))
        return await asyncio.wrap_future(future)

    def _done(self, size: int) -> None:
        with self._lock:
            self._waiting -= 1
            self._waiting_bytes -= size


def _guarded(work: Callable[[], T]) -> T:
    try:
        return work()
    except BaseException as error:
        # A panic in the library's Rust code is a BaseException, which would otherwise end more than this request.
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RequestError(ErrorCode.TEXT_FAILED, f"the tokenizer raised {type(error).__name__}") from error


def _load(checkpoint: Checkpoint) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(checkpoint.tokenizer_file))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{checkpoint.tokenizer_file} is not a tokenizer: {error}") from error
    # tokenizer.json may configure both for training.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

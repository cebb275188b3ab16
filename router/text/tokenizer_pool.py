"""Tokenizes and detokenizes in a few threads, which release the GIL meanwhile, so the event loop is not blocked."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from tokenizers import Encoding, Tokenizer

from router.errors import Reason, RequestError
from router.parse.chat import ChatPrompt
from router.parse.prompt import IdsPrompt, Prompt, TextPrompt
from router.text.chat_template import ChatTemplates
from router.text.fair_threads import FairThreads
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import Checkpoint
from sluice.checkpoint.vocabulary import Vocabulary, decode, encode
from sluice.wire.errors import ErrorCode
from sluice.wire.params import TextParams

ID_BYTES = 8
"""Estimated bytes of text per token id, for the limit on queued work."""

INLINE_BYTES = 512
"""Text prompts up to this size are tokenized on the event loop: passing them to a thread would cost about as much."""

T = TypeVar("T")


class TokenizerPool:
    """The model's tokenizer and chat template. Raises CheckpointError if they cannot be read.

    Tenants share its threads, and the room for texts that wait for them (`FairThreads`). Methods raise RequestError
    OVERLOADED if there is no room. What is no part of a request's prompt (`later`) comes after the tenant's prompts.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        threads: int,
        max_rendered_bytes: int,
        tenant_weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
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
        self._threads = FairThreads(threads, tenant_weights)
        self.vocabulary = Vocabulary(self._tokenizer)

    @property
    def shows_tools(self) -> bool:
        """Whether the model's chat template uses the tools of a chat."""
        return self._templates.show_tools

    def num_tokens_beyond(self, vocab_size: int) -> int:
        """Number of the tokenizer's tokens whose ids are not in a vocabulary of this size."""
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        return sum(number >= vocab_size for number in ids)

    async def tokens(self, prompt: Prompt, tenant: str = "", *, later: bool = False) -> list[int]:
        """Token ids of the whole prompt, before truncation. Raises RequestError."""
        if isinstance(prompt, IdsPrompt):
            return list(prompt.ids)
        if isinstance(prompt, TextPrompt) and prompt.size <= INLINE_BYTES:
            return _guarded(lambda: self._encode_prompt(prompt))
        return await self._run(prompt.size, lambda: self._encode_prompt(prompt), tenant, later)

    async def spellings(self, words: Sequence[str], tenant: str = "") -> list[list[list[int]]]:
        """For each word: its token ids at the start of a text, after a space, and within a text without a space before
        it. The first may equal the second (SentencePiece prepends a space to texts) or the last (byte-level BPE)."""
        if not words:
            return []
        size = 3 * sum(len(word.encode()) + 1 for word in words)
        return await self._run(size, lambda: self._spell(words), tenant)

    async def encode(
        self, text: str, add_special_tokens: bool, offsets: bool, into: Callable[[Encoding], T], tenant: str = ""
    ) -> T:
        """`into(encoding)`, which is also called in the thread, since a text may have millions of tokens. Comes after
        prompts. Without `offsets`, the encoding's are 0."""
        tokenizer = self._tokenizer
        size = len(text.encode())
        return await self._run(
            size, lambda: into(encode(tokenizer, text, add_special_tokens, offsets)), tenant, later=True
        )

    async def decode(
        self, ids: Sequence[int], skip_special_tokens: bool, tenant: str = "", *, later: bool = False
    ) -> str:
        """The text of token ids. Invalid UTF-8 becomes U+FFFD."""
        tokens, tokenizer = list(ids), self._tokenizer
        size = ID_BYTES * len(tokens)
        return await self._run(size, lambda: decode(tokenizer, tokens, skip_special_tokens), tenant, later)

    async def prompt_text(self, ids: Sequence[int], text: TextParams, tenant: str = "") -> str:
        """The text of a prompt that precedes the text of an output."""
        skip, keep = text.skip_special_tokens, text.keep_special_tokens
        return await self._run(ID_BYTES * len(ids), lambda: self.vocabulary.prompt_text(ids, skip, keep), tenant)

    async def compute(self, size: int, work: Callable[[], T], tenant: str = "") -> T:
        """`work()`, run in a thread after prompts; it need not process text. `size`: bytes of its input."""
        return await self._run(size, work, tenant, True)

    def close(self) -> None:
        """Stop the threads and drop queued work."""
        self._threads.close()

    async def _run(self, size: int, work: Callable[[], T], tenant: str = "", later: bool = False) -> T:
        return await self._threads.run(lambda: _guarded(work), size, tenant, later=later)

    def _spell(self, words: Sequence[str]) -> list[list[list[int]]]:
        def ids(text: str) -> list[int]:
            return list(encode(self._tokenizer, text, add_special_tokens=False).ids)

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
        return list(encode(self._tokenizer, text, prompt.add_special_tokens).ids)

    def _render(self, chat: ChatPrompt) -> str:
        text = self._templates.render(chat)
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > self._max_rendered_bytes:
            description = f"is {size} bytes when rendered, at most {self._max_rendered_bytes} are allowed"
            raise RequestError.at(chat.field, description, reason=Reason.TOO_MANY)
        return text


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

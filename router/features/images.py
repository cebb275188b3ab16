"""Images of a prompt. Each replaces a placeholder among the prompt's tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, islice
from typing import NamedTuple, TypeVar

import msgspec

from router.errors import Reason, RequestError, Violation, Violations
from router.parse.chat import MAX_PARTS
from router.parse.model import Limits, ServedModel
from router.peers.offers import Need
from router.requests.part import CHAT_PARTS, Part
from router.text.tokenizer_pool import TokenizerPool
from sluice.checkpoint.vision import Grid, ScalingError, Vision
from sluice.pictures import PictureError, check_picture, upright_size
from sluice.v1 import generation_pb2 as pb
from sluice.wire.tables import MAX_IMAGE_BYTES, MAX_IMAGES, Image, PromptTables

T = TypeVar("T")

FIELD = "spec.images"
CHAT_FIELD = "spec.chat.messages"


class GivenImage(NamedTuple):
    field: str
    data: bytes


class Images:
    def __init__(self, model: ServedModel, limits: Limits, text: TokenizerPool) -> None:
        self._model = model
        self._limits = limits
        self._text = text
        # If the model supports images, even a prompt without images must be checked for image placeholders.
        prompts = () if model.vision is None else ("text", "token_ids", "chat")
        self.fields = frozenset({"images", CHAT_PARTS, *prompts})

    async def parse(self, message: pb.GenerationSpec, bad: Violations, _: str) -> "_Images | None":
        images, vision = _given(message, self._limits), self._model.vision
        if vision is None:
            for image in images[:1]:
                problem = f"is an image, but the model {self._model.name} does not support images"
                bad.add(image.field, problem, reason=Reason.NOT_SUPPORTED)
            return None
        if images and _within_limits(images, bad):
            for path, data in images:
                if not data:
                    bad.add(f"{path}.data", "is empty", reason=Reason.MISSING)
            _check_conflicts(message, bad)
        return _Images(images[:MAX_IMAGES], vision, f"spec.{message.WhichOneof('prompt')}", self._text)


@dataclass(frozen=True, slots=True)
class _Images(Part):
    """The images of a request, possibly none. They are not decoded yet."""

    images: tuple[GivenImage, ...]
    vision: Vision
    prompt_field: str
    text: TokenizerPool = field(compare=False)

    def needs(self) -> Iterator[Need]:
        if self.images:
            path, rows = self.images[0].field, self.vision.rows
            refusal = Violation(path, "is an image, but no engine supports images with this model")
            yield Need("image_rows", str(rows), f"images of {rows} tokens", "", lambda _: refusal)

    @property
    def own_bytes(self) -> int:
        return sum(len(image.data) for image in self.images)

    async def place(self, tokens: list[int], first: int, tenant: str) -> tuple[list[int], int]:
        if self.images and self.vision.scaling is not None:
            # Reading the headers takes about 100 µs per image.
            rows = await self.text.compute(0, self._rows_by_size, tenant)
        else:
            rows = [self.vision.rows for _ in self.images]
        return self._expanded(tokens, rows, first), first + sum(rows)

    async def load(self, tables: PromptTables, tenant: str) -> PromptTables:
        """Each image is separate work: decoding all of them may take ten seconds, and other tenants have their turns in
        between."""
        bad = Violations()
        loaded: list[Image] = []
        for image in self.images:
            loaded += await self.text.compute(
                len(image.data), partial(self._checked, image, self._decoded, bad), tenant
            )
        bad.raise_if_any()
        return msgspec.structs.replace(tables, images=tuple(loaded)) if loaded else tables

    def _rows_by_size(self) -> list[int]:
        """Number of rows of each image. Raises RequestError that names all images whose size cannot be used."""
        bad = Violations()
        grids = [grid for image in self.images for grid in self._checked(image, self._grid, bad)]
        bad.raise_if_any()
        return [self.vision.rows if grid is None else grid.rows for grid in grids]

    def _expanded(self, tokens: Sequence[int], sizes: Sequence[int], first: int) -> list[int]:
        """`tokens`, with each placeholder replaced by the ids of its image's rows.

        Raises RequestError unless there is one placeholder per image.
        """
        places = [place for place, token in enumerate(tokens) if token == self.vision.token_id]
        if len(places) != len(self.images):
            placeholders = f"has {len(places)} image placeholders (token {self.vision.token_id})"
            problem = f"{placeholders}, but the request has {len(self.images)} images"
            raise RequestError.at(self.prompt_field, problem, reason=Reason.CONFLICT)
        parts: list[Sequence[int]] = []
        end = 0
        for place, rows in zip(places, sizes, strict=True):
            parts += tokens[end:place], range(first, first + rows)
            end, first = place + 1, first + rows
        return [*chain.from_iterable(parts), *tokens[end:]]

    def _checked(self, image: GivenImage, read: Callable[[GivenImage], T], bad: Violations) -> tuple[T, ...]:
        """The result of `read`; none if the image is invalid."""
        try:
            return (read(image),)
        except (PictureError, ScalingError) as error:
            bad.add(f"{image.field}.data", str(error))
            return ()

    def _decoded(self, image: GivenImage) -> Image:
        """The checked image. Takes a few milliseconds per megapixel."""
        check_picture(image.data)
        grid = self._grid(image)
        if grid is None:
            return Image.of(self.vision.rows, image.data)
        return Image.of(grid.rows, image.data, grid.columns)

    def _grid(self, image: GivenImage) -> Grid | None:
        return None if self.vision.scaling is None else self.vision.grid(*upright_size(image.data))


def _given(spec: pb.GenerationSpec, limits: Limits) -> tuple[GivenImage, ...]:
    """The images of the request, but at most one more than the limit."""
    images = [GivenImage(f"{FIELD}[{i}]", image.data) for i, image in enumerate(islice(spec.images, MAX_IMAGES + 1))]
    # Skip messages and parts beyond the limits, which parse_chat refuses.
    for i, message in enumerate(islice(spec.chat.messages, limits.messages)):
        for j, part in enumerate(islice(message.parts, MAX_PARTS)):
            if part.WhichOneof("part") == "image" and len(images) <= MAX_IMAGES:
                images.append(GivenImage(f"{CHAT_FIELD}[{i}].parts[{j}].image", part.image.data))
    return tuple(images)


def _within_limits(images: Sequence[GivenImage], bad: Violations) -> bool:
    if len(images) > MAX_IMAGES:
        problem = f"is one image too many: a request may have at most {MAX_IMAGES} images"
        bad.add(images[-1].field, problem, reason=Reason.TOO_MANY)
        return False
    total = list(accumulate(len(image.data) for image in images))
    beyond = next((i for i, size in enumerate(total) if size > MAX_IMAGE_BYTES), None)
    if beyond is not None:
        reason = f"brings the images to {total[beyond]} bytes, at most {MAX_IMAGE_BYTES} are allowed together"
        bad.add(f"{images[beyond].field}.data", reason, reason=Reason.TOO_MANY)
    return beyond is None


def _check_conflicts(spec: pb.GenerationSpec, bad: Violations) -> None:
    kind = spec.WhichOneof("prompt")
    if spec.images and kind not in ("text", "token_ids"):
        why = "images of a chat are parts of its messages" if kind == "chat" else f"{kind} has no placeholders"
        bad.add(FIELD, f"may only be combined with text or token_ids: {why}", reason=Reason.CONFLICT)
    if spec.HasField("truncate_prompt_tokens"):
        reason = f"is {spec.truncate_prompt_tokens}, cannot be combined with images"
        bad.add("spec.truncate_prompt_tokens", reason, reason=Reason.CONFLICT)
    if spec.prompt_table.token_extra_ids:
        bad.add(
            "spec.prompt_table.token_extra_ids",
            "cannot be combined with images, which take several tokens each",
            reason=Reason.CONFLICT,
        )
    if spec.output.HasField("prompt_logprobs"):
        reason = f"is {spec.output.prompt_logprobs}, cannot be combined with images, whose rows have no probability"
        bad.add("spec.output.prompt_logprobs", reason, reason=Reason.CONFLICT)

"""Images of a prompt, each in place of a placeholder among its tokens."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import NamedTuple, TypeVar

from router.errors import Reason, RequestError, Violation, Violations
from router.validate.chat import MAX_PARTS
from router.validate.model import Limits, Model
from router.validate.tables import TABLE_FIELD, GivenTable
from sluice.ring.images import MAX_IMAGE_BYTES, MAX_IMAGES, Image
from sluice.ring.pictures import PictureError, open_picture, upright_size
from sluice.ring.scaling import Grid, ScalingError
from sluice.ring.vision import Vision
from sluice.v1 import generation_pb2 as pb

T = TypeVar("T")

FIELD = "spec.images"
CHAT_FIELD = "spec.chat.messages"


class GivenImage(NamedTuple):
    field: str
    data: bytes


@dataclass(frozen=True, slots=True)
class GivenImages:
    """Those of a request, of which there may be none; not decoded yet."""

    images: tuple[GivenImage, ...]
    vision: Vision
    first_id: int
    """Of their rows: behind those of the request's table."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(len(image.data) for image in self.images)

    @property
    def vary(self) -> bool:
        """Whether there are any whose sizes decide how many rows they have."""
        return bool(self.images) and self.vision.scaling is not None

    def sizes(self) -> list[int]:
        """Rows of each. Takes some 100 µs per image if they vary, for the headers. Raises RequestError."""
        return [self.vision.rows if grid is None else grid.rows for grid in self._checked(self._grid)]

    def expand(self, tokens: Sequence[int], sizes: Sequence[int], field: str) -> list[int]:
        """Rows in place of placeholders. `field`: of the prompt. Raises RequestError unless there is one per image."""
        places = [place for place, token in enumerate(tokens) if token == self.vision.token_id]
        if len(places) != len(self.images):
            found = f"has {len(places)} image placeholders (token {self.vision.token_id})"
            raise RequestError.invalid(
                [Violation(field, f"{found}, but the request {len(self.images)} images", reason=Reason.CONFLICT)]
            )
        parts: list[Sequence[int]] = []
        end, first = 0, self.first_id
        for place, rows in zip(places, sizes, strict=True):
            parts += tokens[end:place], range(first, first + rows)
            end, first = place + 1, first + rows
        return [*chain.from_iterable(parts), *tokens[end:]]

    def load(self) -> tuple[Image, ...]:
        """Takes some milliseconds per megapixel. Raises RequestError for what cannot be decoded."""
        return self._checked(self._load)

    def _load(self, image: GivenImage) -> Image:
        open_picture(image.data)
        grid = self._grid(image)
        if grid is None:
            return Image.of(self.vision.rows, image.data)
        return Image.of(grid.rows, image.data, grid.columns)

    def _grid(self, image: GivenImage) -> Grid | None:
        return self.vision.grid(*upright_size(image.data)) if self.vary else None

    def _checked(self, read: Callable[[GivenImage], T]) -> tuple[T, ...]:
        """What it gives for each. Raises RequestError with all images that it refuses."""
        bad, found = Violations(), []
        for image in self.images:
            try:
                found.append(read(image))
            except (PictureError, ScalingError) as error:
                bad.add(f"{image.field}.data", str(error))
        bad.raise_if_any()
        return tuple(found)


def parse_images(
    spec: pb.GenerationSpec, model: Model, limits: Limits, table: GivenTable | None, bad: Violations
) -> GivenImages | None:
    """None: the model takes none. Meaningless if `bad` has violations."""
    images = _given(spec, limits)
    if model.vision is None:
        for field, _ in images[:1]:
            bad.add(field, f"is an image, but the model {model.name} takes none", reason=Reason.NOT_SUPPORTED)
        return None
    if images and _few(images, bad):
        for field, data in images:
            if not data:
                bad.add(f"{field}.data", "is empty", reason=Reason.MISSING)
        _check_conflicts(spec, bad)
    first = model.vocab_size + (0 if table is None else table.rows)
    return GivenImages(images[:MAX_IMAGES], model.vision, first)


def check_image_rows(images: GivenImages | None, known: Set[int] | None) -> None:
    """Raises RequestError if no engine takes such images. `known`: rows of those that engines take; None: no engine has
    said it."""
    if images is not None and images.images and known is not None and images.vision.rows not in known:
        description = "is an image, and no engine takes any with this model"
        raise RequestError.invalid([Violation(images.images[0].field, description)])


def _given(spec: pb.GenerationSpec, limits: Limits) -> tuple[GivenImage, ...]:
    """One more than there may be at most."""
    found = [GivenImage(f"{FIELD}[{i}]", image.data) for i, image in enumerate(islice(spec.images, MAX_IMAGES + 1))]
    # Those that parse_chat refuses are not looked at.
    for i, message in enumerate(islice(spec.chat.messages, limits.messages)):
        for j, part in enumerate(islice(message.parts, MAX_PARTS)):
            if part.WhichOneof("part") == "image" and len(found) <= MAX_IMAGES:
                found.append(GivenImage(f"{CHAT_FIELD}[{i}].parts[{j}].image", part.image.data))
    return tuple(found)


def _few(images: Sequence[GivenImage], bad: Violations) -> bool:
    if len(images) > MAX_IMAGES:
        bad.add(images[-1].field, f"is one image too many: a request may have {MAX_IMAGES}", reason=Reason.TOO_MANY)
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
        where = "images of a chat are parts of its messages" if kind == "chat" else f"{kind} has no placeholders"
        bad.add(FIELD, f"may be given with text and token_ids only: {where}", reason=Reason.CONFLICT)
    if spec.HasField("truncate_prompt_tokens"):
        reason = f"is {spec.truncate_prompt_tokens}, cannot be combined with images"
        bad.add("spec.truncate_prompt_tokens", reason, reason=Reason.CONFLICT)
    if spec.prompt_table.token_extra_ids:
        bad.add(
            f"{TABLE_FIELD}.token_extra_ids",
            "cannot be combined with images, which take several tokens each",
            reason=Reason.CONFLICT,
        )
    if spec.output.HasField("prompt_logprobs"):
        reason = f"is {spec.output.prompt_logprobs}, cannot be combined with images, whose rows have no probability"
        bad.add("spec.output.prompt_logprobs", reason, reason=Reason.CONFLICT)

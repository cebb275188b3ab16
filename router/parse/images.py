"""Images of a prompt. Each replaces a placeholder among the prompt's tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import NamedTuple, TypeVar

from router.errors import Reason, RequestError, Violation, Violations
from router.parse.chat import MAX_PARTS
from router.parse.model import Limits, ServedModel
from router.parse.needs import Need
from router.parse.tables import TABLE_FIELD, GivenTable
from sluice.checkpoint.scaling import Grid, ScalingError
from sluice.checkpoint.vision import Vision
from sluice.pictures.decode import PictureError, check_picture, upright_size
from sluice.v1 import generation_pb2 as pb
from sluice.wire.images import MAX_IMAGE_BYTES, MAX_IMAGES, Image

T = TypeVar("T")

FIELD = "spec.images"
CHAT_FIELD = "spec.chat.messages"


class GivenImage(NamedTuple):
    field: str
    data: bytes


@dataclass(frozen=True, slots=True)
class GivenImages:
    """The images of a request, possibly none. They are not decoded yet."""

    images: tuple[GivenImage, ...]
    vision: Vision
    first_id: int
    """Id of the first row; follows the ids of the request's table."""

    @property
    def size(self) -> int:
        """Total size of the images in bytes."""
        return sum(len(image.data) for image in self.images)

    @property
    def vary(self) -> bool:
        """Whether the number of rows of an image depends on its size."""
        return bool(self.images) and self.vision.scaling is not None

    def sizes(self) -> list[int]:
        """Number of rows of each image. If it varies, reading the headers takes about 100 µs per image. Raises
        RequestError."""
        return [self.vision.rows if grid is None else grid.rows for grid in self._checked(self._grid)]

    def expand(self, tokens: Sequence[int], sizes: Sequence[int], field: str) -> list[int]:
        """`tokens`, with each placeholder replaced by the ids of its image's rows. `field`: field of the prompt.

        Raises RequestError unless there is one placeholder per image.
        """
        places = [place for place, token in enumerate(tokens) if token == self.vision.token_id]
        if len(places) != len(self.images):
            placeholders = f"has {len(places)} image placeholders (token {self.vision.token_id})"
            problem = f"{placeholders}, but the request has {len(self.images)} images"
            raise RequestError.invalid([Violation(field, problem, reason=Reason.CONFLICT)])
        parts: list[Sequence[int]] = []
        end, first = 0, self.first_id
        for place, rows in zip(places, sizes, strict=True):
            parts += tokens[end:place], range(first, first + rows)
            end, first = place + 1, first + rows
        return [*chain.from_iterable(parts), *tokens[end:]]

    def load(self, image: GivenImage, bad: Violations) -> tuple[Image, ...]:
        """Decode one image, which takes some milliseconds per megapixel; none if it is invalid."""
        try:
            return (self._load(image),)
        except (PictureError, ScalingError) as error:
            bad.add(f"{image.field}.data", str(error))
            return ()

    def _load(self, image: GivenImage) -> Image:
        check_picture(image.data)
        grid = self._grid(image)
        if grid is None:
            return Image.of(self.vision.rows, image.data)
        return Image.of(grid.rows, image.data, grid.columns)

    def _grid(self, image: GivenImage) -> Grid | None:
        return self.vision.grid(*upright_size(image.data)) if self.vary else None

    def _checked(self, read: Callable[[GivenImage], T]) -> tuple[T, ...]:
        """The result of `read` for each image. Raises RequestError that names all images for which `read` fails."""
        bad, results = Violations(), []
        for image in self.images:
            try:
                results.append(read(image))
            except (PictureError, ScalingError) as error:
                bad.add(f"{image.field}.data", str(error))
        bad.raise_if_any()
        return tuple(results)


def parse_images(
    spec: pb.GenerationSpec, model: ServedModel, limits: Limits, table: GivenTable | None, bad: Violations
) -> GivenImages | None:
    """The images; None if the model does not support images. Must not be used if `bad` has violations."""
    images = _given(spec, limits)
    if model.vision is None:
        for field, _ in images[:1]:
            problem = f"is an image, but the model {model.name} does not support images"
            bad.add(field, problem, reason=Reason.NOT_SUPPORTED)
        return None
    if images and _within_limits(images, bad):
        for field, data in images:
            if not data:
                bad.add(f"{field}.data", "is empty", reason=Reason.MISSING)
        _check_conflicts(spec, bad)
    first = model.vocab_size + (0 if table is None else table.rows)
    return GivenImages(images[:MAX_IMAGES], model.vision, first)


def image_need(images: GivenImages) -> Need:
    """`images` must not be empty."""
    rows = images.vision.rows
    refusal = Violation(images.images[0].field, "is an image, but no engine supports images with this model")
    return Need("image_rows", str(rows), f"images of {rows} tokens", "", lambda _: refusal)


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
            f"{TABLE_FIELD}.token_extra_ids",
            "cannot be combined with images, which take several tokens each",
            reason=Reason.CONFLICT,
        )
    if spec.output.HasField("prompt_logprobs"):
        reason = f"is {spec.output.prompt_logprobs}, cannot be combined with images, whose rows have no probability"
        bad.add("spec.output.prompt_logprobs", reason, reason=Reason.CONFLICT)

"""sluice.v1.ModelService: the one model served here."""

from typing import NoReturn

from router.api.rpc import Context
from router.errors import RequestError
from router.requests.dispatcher import Dispatcher
from router.validate.model import Model
from router.validate.spec import check_model
from sluice.ring.errors import ErrorCode
from sluice.v1 import admin_pb2 as pb


class ModelService:
    def __init__(self, model: Model, dispatcher: Dispatcher) -> None:
        self._model = model
        self._dispatcher = dispatcher

    async def list_models(self, _: pb.ListModelsRequest, __: Context) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[self._describe()])

    async def get_model_info(self, message: pb.GetModelInfoRequest, _: Context) -> pb.GetModelInfoResponse:
        check_model(message.model, self._model, "model")
        return pb.GetModelInfoResponse(model=self._describe())

    async def load_lora(self, _: pb.LoadLoraRequest, __: Context) -> NoReturn:
        raise not_built_yet("ModelService.LoadLora")

    async def unload_lora(self, _: pb.UnloadLoraRequest, __: Context) -> NoReturn:
        raise not_built_yet("ModelService.UnloadLora")

    async def list_loras(self, _: pb.ListLorasRequest, __: Context) -> NoReturn:
        raise not_built_yet("ModelService.ListLoras")

    def _describe(self) -> pb.Model:
        model = self._model
        return pb.Model(
            name=model.name,
            max_context_tokens=self._dispatcher.context_tokens,
            vocab_size=model.vocab_size,
            dtype=model.dtype,
            capabilities=["chat"] if model.has_chat else [],
            eos_token_ids=model.eos_token_ids,
            tokenizer_fingerprint=model.tokenizer_fingerprint,
        )


def not_built_yet(method: str) -> RequestError:
    return RequestError(ErrorCode.NOT_BUILT_YET, f"{method} is not built yet", metadata={"method": method})

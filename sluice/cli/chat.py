"""`sluice chat`: a conversation with the model."""

from typing import Annotated

import typer

from sluice.cli.chat_session import ChatSession
from sluice.cli.common import LoraId, PromptAdapterId, Server, fail, with_server
from sluice.cli.sampling import with_sampling
from sluice.client import Client, Options
from sluice.v1.admin_pb2 import Model


@with_server
@with_sampling
def chat(
    server: Server,
    sampling: Options,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    lora: LoraId = None,
    prompt_adapter: PromptAdapterId = None,
) -> None:
    """Chat with the model.

    /help lists the commands of a chat, such as /set and /system. Ctrl-C stops an answer, Ctrl-D quits. Without a
    terminal, each line of stdin is a message: echo 'Why is the sky blue?' | sluice chat
    """
    options = sampling | Options(lora_id=lora, prompt_adapter_id=prompt_adapter)
    with server.client() as client:
        ChatSession(client, chat_model(client), system, options).run()


def chat_model(client: Client) -> Model:
    """The model with a chat template. Raises typer.Exit if there is none."""
    models = client.models()
    for model in models:
        if "chat" in model.capabilities:
            return model
    names = ", ".join(model.name for model in models) or "no model"
    raise fail(f"{names} has no chat template; use sluice generate to complete a prompt instead")

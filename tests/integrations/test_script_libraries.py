"""tierwise run on scripts that leave the loop to a library: nothing in them knows of Tierwise."""

from __future__ import annotations

import pytest

TRAINER = """
from integrations.test_huggingface import losses, make_trainer
trainer = make_trainer("folder", 2, save_strategy="no")
trainer.train()
print("losses", losses(trainer))
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = tower()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
for number in range(2):
    loss = model(**batch(number))
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print("losses", loss.item())
"""
LIGHTNING = """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = tower()
    def training_step(self, number, place):
        loss = self.network(**batch(int(number)))
        print("losses", loss.item())
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = lightning.Trainer(max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Module(), torch.utils.data.DataLoader(range(2)))
"""


def printed(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("losses")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("library", "source", "name"),
    [("transformers", TRAINER, "WithLoss with AdamW"), ("accelerate", ACCELERATE, "Tower with SGD"), ("lightning", LIGHTNING, "Tower with SGD")],
    ids=["transformers", "accelerate", "lightning"],
)
def test_a_library_that_owns_the_loop(library, source, name, run, expected):
    pytest.importorskip(library)
    code, out, said, _ = run(source)
    assert code == 0
    assert printed(out) == printed(expected(source)) != []
    assert len(said) == 2 and said[0].startswith(f"{name}: budget 1.00 MiB; keeping everything takes") and said[1].startswith("2 steps")

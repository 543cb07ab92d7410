"""Where other people's loops meet `tierwise.fit`. Every file here imports the library it is for when it is used, never before.

script.py         unmodified scripts: `tierwise run`
huggingface.py    Trainer, and what derives from it
accelerate.py     models that went through Accelerator.prepare
lightning.py      a callback
compiler.py       torch.compile(model, backend="tierwise")
progress.py       what fit is doing, on a terminal
watching.py       tierwise.watch(model): a line of numbers while it trains
"""

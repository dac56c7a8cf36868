import os

from aider.coders import Coder
from aider.io import InputOutput
from aider.models import Model

os.environ["OPENAI_API_BASE"] = f"{os.environ['ROOT']}/v1"
os.environ["OPENAI_API_KEY"] = "none"
coder = Coder.create(main_model=Model("openai/sonnet"), io=InputOutput(yes=True, pretty=False), use_git=False)
for number in (1, 2):
    print(coder.run(f"Remember: secret {number} is value-{number}"))

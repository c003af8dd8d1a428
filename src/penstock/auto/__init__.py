"""AutoConfig, AutoModel, AutoTokenizer and GenerationConfig: the interface that tutorials of other libraries use.

These are thin wrappers over ``penstock.LLM``.  An option is honoured or refused, and a refusal names what to use.
"""

from penstock.auto.config import AutoConfig
from penstock.auto.model import AutoModel
from penstock.auto.tokenizer import AutoTokenizer
from penstock.llm.generate.options import GenerateOutput, GenerationConfig

__all__ = ["AutoConfig", "AutoModel", "AutoTokenizer", "GenerateOutput", "GenerationConfig"]

"""Plug-in for vLLM, which finds it by the entry point `vllm.general_plugins` of this package.

Nothing is imported before vLLM calls `register`, and nothing but vLLM calls it. The plug-in runs
in environments that have neither DeepSpeed nor datasets.
"""

ARCHITECTURE = "Eagle3JakiroForCausalLM"
"""Name in the config of exported drafters; vLLM expects its prefix of drafters of this kind."""


def register() -> None:
    """Tell vLLM which class loads the drafters that `jakiro export --to vllm` writes."""
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, "inference.vllm_plugin.model:VllmDrafter")

"""The blocks of each family of models, operator by operator: what they keep for the backward and where their memory peaks.

Start with the file of your family; its docstring and program follow transformers' ``modeling_<family>.py``:

- ``llama.py``: Llama, InternLM3, Mistral, CWM, Qwen2, **Qwen3**, Seed-OSS, SmolLM3, Hunyuan, Arcee, Jais 2, Granite.
  ``helium.py``: Helium. ``mixtral.py``: Mixtral, Qwen3-MoE, OLMoE, MiniMax-M2. ``qwen3_next.py``: Qwen3-Next, Qwen3.5.
  ``olmo_hybrid.py``: OLMo Hybrid. ``glm4_moe.py``: GLM-4 MoE, dots.llm1, Solar Open, Hunyuan 3, K-EXAONE.
- ``granitemoehybrid.py``: Granite 4. ``nemotron_h.py``, ``bamba.py``, ``falcon_h1.py``. All have Mamba-2, in ``state_space.py``.
- ``gemma.py``: Gemma, Gemma 2 and 3. ``gemma4.py``: Gemma 4, with ``per_layer.py`` and ``all_layers.py`` of its
  small models. ``olmo2.py``: OLMo 2 and 3, EXAONE 4. ``glm4.py``: GLM and GLM-4.
- ``minimax.py``: MiniMax-Text-01 and M1, with lightning attention.
- ``kimi_linear.py``: Kimi Linear, whose recurrence is in ``kimi_delta.py``.
- ``lfm2.py``: LFM2, dense and with experts. ``apertus.py``: Apertus. ``mllama.py``: layers of Llama 3.2 Vision.
- ``llama4.py``: Llama 4. ``hunyuan_moe.py``: Hunyuan-A13B. ``ernie4_5.py``: ERNIE 4.5, dense and with experts.
- ``cohere.py``: Command R and Command A. ``deepseek.py``: DeepSeek-V2 and V3, Mistral 4, Youtu-LLM. ``torchtitan.py``:
  torchtitan's own Llama 3.
- ``phi.py``, ``phi3.py``, ``starcoder2.py``, ``gpt2.py``, ``gpt_neox.py``, ``opt.py``, ``bloom.py``, ``gpt_oss.py``, ``falcon.py``:
  one family each.

The families share ``decoder.py`` (layer, attention, MLPs), ``attention.py`` (kernels), ``experts.py``, ``activation.py`` and
``operators.py`` (what each operator allocates and saves). ``sharded.py``, ``ring.py`` and ``frozen.py`` replace some operators
under tensor and context parallelism and fine-tuning. ``definition.py`` lists what a family's file defines, ``keys.py`` the
keys of its ``config.json``.

``tape.py`` runs a program. ``traced.py``, ``ending.py``, ``split_backward.py`` and ``requested.py`` turn the tape into lines for
engines.
"""

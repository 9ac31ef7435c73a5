"""Place of the vLLM adapter, which is not part of this version.

The package exists so that its name belongs to this distribution. It holds no code yet: there is nothing to
import from it, and no entry point registers it with vLLM.
"""

import warnings

# Megatron-core says at import that Apex and Transformer Engine are missing, and at each step that it uses names of
# collectives which torch has since renamed. Neither is for the user of this library to act on.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+` is deprecated")

"""The teacher: other weights, or another model, that scores the student's responses under a richer prompt.

SDPO's self-teacher (the EMA is fp32, seeded from and fed by the optimizer's fp32 masters), frozen checkpoints of any
shape, one for each source of data (`local`), or a server that scores the sampled tokens (`remote`).
"""

from rlpost.teacher.config import (
    TeacherConfig,
    build_teacher_config,
    check_external,
    directory_mistakes,
    shape_differences,
)

__all__ = ["TeacherConfig", "build_teacher_config", "check_external", "directory_mistakes", "shape_differences"]

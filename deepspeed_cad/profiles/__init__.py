"""Machine profiles: what attention and links cost on a machine, measured once, in seconds.

In: a file that `deepspeed-cad profile` wrote, or one of this folder. Out: a `CostModel` for the heads of a layer.
"""

from deepspeed_cad.profiles.measure import Fit
from deepspeed_cad.profiles.profile import Profile, ShapeCost, choose_profile, user_path

__all__ = ["Fit", "Profile", "ShapeCost", "choose_profile", "user_path"]

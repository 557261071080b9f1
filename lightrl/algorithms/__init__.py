"""Algorithms: each a subclass of RLModule in a file of its own, which states its formula and cites its paper.

Every one of them is ``RLModule`` but for what its file says; its arguments are RLModule's and those named there. The
defaults are the papers', except that ``lr`` is RLModule's and no KL is added where the paper's setting wants none.
"""

from lightrl.algorithms.cispo import CISPO
from lightrl.algorithms.dapo import DAPO
from lightrl.algorithms.dr_grpo import DrGRPO
from lightrl.algorithms.grpo import GRPO
from lightrl.algorithms.gspo import GSPO
from lightrl.algorithms.opo import OPO
from lightrl.algorithms.ppo import PPO
from lightrl.algorithms.reinforce_plus_plus import REINFORCEPlusPlus
from lightrl.algorithms.rloo import RLOO

__all__ = ["CISPO", "DAPO", "GRPO", "GSPO", "OPO", "PPO", "RLOO", "DrGRPO", "REINFORCEPlusPlus"]

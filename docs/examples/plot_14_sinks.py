"""
Attention sinks
===============
A sink is a learned logit per head that takes part in the softmax and has no value: with it, a head can attend to nothing.
"""

import cuflash
import matplotlib.pyplot as plt
import numpy as np

rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 1, 200, 32))
levels = np.linspace(-5, 12, 40)
shares, norms = [], []
for level in levels:
    o, lse = cuflash.attention(
        q, k, v, causal=True, sink=np.array([level]), return_lse=True
    )
    shares.append(1 - np.exp(level - lse).mean())
    norms.append(np.linalg.norm(o, axis=-1).mean())
_, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(levels, shares, label="weight of the keys")
axes.plot(levels, norms / np.max(norms), label="norm of o, relative")
axes.set(xlabel="sink logit")
axes.legend()

# %%
# The sink is learned: its gradient is computed with those of q, k and v.

_, vjp = cuflash.attention_vjp(q, k, v, causal=True, sink=np.array([2.0]), wrt="sink")
print(vjp(np.ones_like(v))["sink"])
plt.show()

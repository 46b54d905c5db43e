"""Bounds on the error of each element of a correct result, computed from the inputs.

Every bound is the first-order error analysis of one flash-attention pass, evaluated on the caller's own numbers, so it
is small for well-scaled data and large otherwise. Nothing in it is fitted. The notation of the derivation:

    T, A        storage dtype; accumulator dtype (float32, or float64 for float64)
    u, ua, up   unit roundoffs of T, of A, and of the dtype to which P and dS are rounded before the second products
    t           relative error of a product by rounding its operands: 0 except with precision tf32 and tf32x3
    w, wa, wp   largest error of an element by underflow in these three dtypes
    k(n)        largest number of roundoffs that a sum of n terms collects
    S, m, L     scores, their row maximum, log-sum-exp; P = exp(S - L); all exact, in natural units
    |X|         element-wise

The scores. q is multiplied by scale log2(e), a rounded constant (at most three roundings), and the product with k sums
head_dim terms. A kernel that scales after the product has no more roundings::

    |error of S| <= ((k(d) + 4) ua + t) |scale| |Q||K|^T

The weights p = exp2(S log2(e) - m'). Subtracting the running maximum rounds once; a later rescaling of the row rounds
its own argument, and those arguments add up to at most |S| + |m|; a fused multiply-add with the rounded m log2(e)
has two roundings. Four roundings cover all of these. exp2 has an error of at most 4 ua (ex2.approx.ftz.f32: 2^-22;
NumPy's is smaller)::

    eta = ((k(d) + 4) ua + t) |scale| |Q||K|^T + 4 ua (|S| + |m|) + 4 ua    so that  |log p^ - log p| <= eta

The effect is not linearized, which keeps the bound valid if eta is large: |p^ - p| <= p (exp(eta) - 1),
and with r = sum_j P_j (exp(eta_j) - 1) the computed row sum lies between l / (1 + r) and l (1 + r).

Sums over keys. k(n) = n holds for any order of summation. It also covers an online softmax with tiles of b >= 6 keys,
whose n / b tiles each add once and rescale once (a product and an exp2, five roundoffs): b + 6 n / b <= n + 8. Kernels
that also divide by the row sum in each tile ("fa1") have tiles of b >= 8: b + 8 (n / b - 1) + 1 <= n + 8.

    tol_L = log(1 + r) + (k(n) + 8) ua + 4 ua (|m| + |L|)        four: log, two changes of base, the last addition
    tol_O = (1 + r) (sum_j P (exp(eta) - 1) |v| + r |O| + (up + t + 2 (k(n) + 8) ua) sum_j P exp(eta) |v|
                     + sum_j min(P, wp / l + wa) |v|) + u |O| + w

The weights relative to the maximum may underflow, and P itself, where a kernel stores it or merges it with a sink. O
is a weighted mean of the rows of v for any weights, so tol_O is at most the spread of v plus the same roundings of
the largest |v|. But it is infinite if eta is: eta of a score that A may not represent in base 2 is infinite.

The gradients. P is recomputed from the stored lse, so its error is eta' = eta + tol_L + 4 ua (|S| + |L|), and
D = rowsum(dO O) uses the stored O, including its error::

    e_dP = ((k(dv) + 2) ua + t) |dO||V|^T      e_D = sum_c |dO| tol_O + (k(dv) + 2) ua sum_c |dO| (|O| + tol_O)
    G    = dP - D + dlse                       e_G = e_dP + e_D + 2 ua (|dP| + |D| + |dlse|)
    e_dS = P (exp(eta') - 1) (|G| + e_G) + P e_G + 2 ua P exp(eta') (|G| + e_G)
    t_dS = e_dS + up (|dS| + e_dS) + min(|dS| + e_dS, wp)      inf if the dtype of up may overflow
    tol_dQ = |scale| sum_j (t_dS + ((k(n) + 8) ua + t) (|dS| + e_dS)) |k| + u |dQ| + w
    tol_dK the same over i, with |q|
    tol_dV = sum_i (P (exp(eta') - 1) + min(P, wp) + (up + t + (k(nq) + 2) ua) P exp(eta')) |dO| + u |dV| + w

A score function f maps S = scale q . k, which has the error above, to the final scores F. The resulting error e_f, and
the derivatives f' by the score and f_a by a captured array, with their own errors, are those of
`cuflash.scores.roundoff`; dF replaces the dS above, and n is the number of scores that read an element of a::

    eta   = e_f + 4 ua (|F| + |m|) + 4 ua
    e_dS  = |f'| e_dF + e_f' (|dF| + e_dF) + 2 ua |f'| (|dF| + e_dF)
    tol_da = sum (e_dF |f_a| + (|dF| + e_dF) e_fa) + (k(n) + 8) ua sum (|dF| + e_dF) (|f_a| + e_fa) + u |da| + w

If one batch entry or head contributes one term to an element, the array has the dtype of the products and f_a is f',
kernels may add up terms that are rounded like dS. This adds up sum (|dF| + e_dF) (|f_a| + e_fa) + n wp.

A sink. It is one more column, with an exact score s and without a value. Kernels merge it with the finished row o, L',
where L' is the log-sum-exp without it: they weight both by exp2 of differences from the larger of L' and s, so the
sink's weight relative to those of the keys has the roundings of L', of a difference, and of two exp2::

    eta_s = 4 ua (|m| + |L'|) + 2 ua (|s| + |L'|) + 8 ua + e_s     r += P_s (exp(eta_s) - 1)
    tol_L += 4 ua ((1 - P_s) |L'| + 1)                             tol_O: plus 4 ua sum_j P exp(eta) |v|
    eta_s' = tol_L + 4 ua (|s| + |L|) + 4 ua + e_s                 delta = D - dlse, e_delta = e_D + 2 ua (|D| + |dlse|)
    tol_ds = sum_i (P_s (exp(eta_s') - 1) + (k(n) + 4) ua P_s exp(eta_s')) (|delta| + e_delta) + P_s e_delta
             + u |ds| + w                                          with u and w of the sink's dtype

Then O is a weighted mean of the rows of v and of 0. e_s is 0, except for a float64 sink if A is float32: the sink is
rounded to A when it is read, so that e_s = ua |s| + wa, and in rows without a key tol_L = e_s.

Dropout multiplies P by Z, which is 0 or 1 / (1 - p), before the products with v and dO, and multiplies dP by Z. So do
the bounds, with two more roundings in sum_j Z P exp(eta) |v|, in |Z dP| and in dV: those of 1 / (1 - p) and of the
product. O is then 1 / (1 - p) times a weighted mean of some of the rows of v and of 0. Kernels may multiply finished
sums by 1 / (1 - p), and with them the wa of each term.

Tangents. A dot marks a tangent: F_dot is that of the final scores, mu = sum_j P F_dot + P_s s_dot is that of lse, and c
is the number of each row that is subtracted from F_dot: a computed mean of F_dot over attended keys::

    R    = max_j |F_dot - mu|, enlarged by the errors of F_dot and of the mean; gap = |F_dot - mu| + R >= |F_dot - c|
    e_Sd = ((k(2 d) + 4) ua + t) |scale| (|Q_dot||K|^T + |Q||K_dot|^T)                (a score function: e_Fd, as e_f)
    e_w  = P (exp(eta') - 1) (gap + e_Fd) + P e_Fd + 2 ua P exp(eta') (gap + e_Fd)
    e_m  = sum_j e_w + (k(n) + 8) ua sum_j (P gap + e_w) + 2 ua R                     of mu - c
    tol_lse_dot = e_m + 4 ua (|mu| + R)
    tol_o_dot   = sum_j (e_w + (up + t + (k(2 n) + 8) ua) (P gap + e_w) + min(., wp)) |v| + e_m (|O| + tol_O) + R tol_O
                  + sum_j (P (exp(eta') - 1) + (up + t + (k(2 n) + 8) ua) P exp(eta') + min(P, wp)) |v_dot|
                  + 3 ua (|O_dot| + R |O| + ...) + u |O_dot| + w

A sink adds P_s (exp(eta_s') - 1) (|s_dot - mu| + R) + 4 ua P_s (...) to e_m. The tangents of gradients are sums of
products x y, each with an error of |x| e_y + e_x (|y| + e_y) plus the roundings of the product::

    e_Pd  = P (exp(eta') - 1) x + P (e_Fd + tol_lse_dot) + 2 ua P exp(eta') x,    x = |F_dot - mu| + e_Fd + tol_lse_dot
    e_h   = e_dPd + e_deltad + 2 ua (|dP_dot| + |delta_dot|)                          h = dP_dot - delta_dot
    e_dFd = |G| e_Pd + (|P_dot| + e_Pd) e_G + P (exp(eta') - 1) |h| + P exp(eta') e_h + 4 ua (...)

and then as for dS above, with |k| and |k_dot| for dq_dot, |q| and |q_dot| for dk_dot, |do| and |do_dot| for dv_dot.

The 8 covers products with the scaled q or k that are scaled back. Sums over a group of heads and over broadcast axes
count as one sum. Products that underflow in A have an error of wa each, and weights recomputed from lse one of
min(P, wa), which is added wherever P (exp(eta') - 1) or P_s (exp(eta_s') - 1) stands. Finally, everything is multiplied
by 1.5, for the omitted products of small terms and for the freedom of compilers to contract and to reorder.

On tensor cores. tf32 has 11 significant bits: rounding two operands gives t = 2 2^-11 + 2^-22. tf32x3 splits an operand
into x = hi + lo + rest, where hi is x rounded to tf32 and lo is x - hi rounded to 11 bits. For x between 2^e and
2^(e + 1), x - hi is a multiple of 2^(e - 23) and at most 2^(e - 11), so |rest| <= 2^-23 |x|. Products of two lo and of
the rests are omitted: t = 2^-22 + 2 2^-23 = 8 ua. Tensor cores round sums toward zero, at most 2 ua every eight
terms, three times over for tf32x3: the ua per term in k(n) covers this.

After N. J. Higham, Accuracy and Stability of Numerical Algorithms, chapter 3, and Blanchard, Higham and Higham,
Accurately computing the log-sum-exp and softmax functions (IMA J. Numer. Anal. 41, 2021).
"""

from .elements import Bounds, error_bound

__all__ = ["Bounds", "error_bound"]

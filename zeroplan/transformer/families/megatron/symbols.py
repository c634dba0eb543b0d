"""The symbols in the sizes of a Megatron-Core layer: a rank's tokens, widths, heads and experts."""

from zeroplan.expr import symbols

#: T_n: tokens of a rank between matrices. T_m: tokens that its matrices read. T_w: those of them that are gathered (0: none).
#: w_n: bytes of a norm's statistics per token.
T_n, T_m, T_w, w_n = symbols("T_n T_m T_w w_n")
#: Tokens whose attention context-parallel ranks exchange (0: none).
(T_c,) = symbols("T_c")
#: A rank's widths of queries, keys, MLP, one expert and shared expert; its heads; the elements of its attention scores.
q_r, k_r, f_r, m_r, f_s, a_r, S_r = symbols("q_r k_r f_r m_r f_s a_r S_r")
#: A rank's widths of values and of attention's output; with latent attention, of the output of the matrix of keys and values.
v_r, c_r, n_r = symbols("v_r c_r n_r")
#: T5's encoder: its tokens, the elements of its attention scores, and those of a decoder layer's cross attention.
T_e, S_e, S_c = symbols("T_e S_e S_c")
#: Pairs of tokens; a mask of padding has one byte for each: in a layer's own attention, the encoder's, and the cross attention.
P_m, P_e, P_c = symbols("P_m P_e P_c")
#: A rank's key heads, the elements of a table of rotary positions, and pairs of tokens of a sequence.
a_k, R_r, P_s = symbols("a_k R_r P_s")
#: Matrices before an MLP's activation: 2 with a gate, else 1.
(g_m,) = symbols("g_m")
#: A rank's part of the hidden width.
(h_r,) = symbols("h_r")
#: Mamba-2 on a rank: inner width, width of both factors, heads, elements in the states of all chunks, and in the factors' products.
i_r, B_r, Z_r, N_r, Q_r = symbols("i_r B_r Z_r N_r Q_r")
#: Experts. A pair is a token and one of its experts. T_g: gathered tokens. X_r, X_s: pairs that this rank receives, and sends.
#: X_1, X_2: pairs that are copied once more before sending, and after receiving (0: none). E_r: experts of this rank. E_g: experts
#: whose gradients are made at once. w_p: bytes of a routing weight.
T_g, X_r, X_s, X_1, X_2, E_r, E_g, w_p = symbols("T_g X_r X_s X_1 X_2 E_r E_g w_p")
#: Received pairs of the first expert, of the second, of those between the second and the last, and of the last.
X_f, X_g, X_i, X_l = symbols("X_f X_g X_i X_l")
#: FP8: bytes of 32 elements with their scales, in one layout and in all layouts that products need. Then T_n, T_m, T_w and X_r,
#: each divided by 32.
x_8, y_8, T_u, T_v, T_t, X_u = symbols("x_8 y_8 T_u T_v T_t X_u")

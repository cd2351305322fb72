/* Second half of linear_tmpl.h: which kernel runs on which tile and rows, float weights, the epilogue. Not to be included elsewhere. */

/* ---- choice of the instance: every combination that occurs is a constant-folded copy of one text ---- */

#define FOR_KINDS(X) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL) X(IQ4_XS) X(MXFP4) X(NVFP4)

#define DEFINE_GEMV(K) \
    static void gemv_##K(int nr, const uint8_t *tile, int64_t groups, const act_line *a, int64_t stride, int64_t ahead, float *acc) { \
        switch (nr) { \
        case 1: gemv(PACK_##K, 1, tile, groups, a, stride, ahead, acc); break; \
        case 2: gemv(PACK_##K, 2, tile, groups, a, stride, ahead, acc); break; \
        case 3: gemv(PACK_##K, 3, tile, groups, a, stride, ahead, acc); break; \
        default: gemv(PACK_##K, 4, tile, groups, a, stride, ahead, acc); break; \
        } \
    } \
    static void unpack_##K(const uint8_t *tile, int64_t g0, int64_t n, uint8_t *codes, float *scales) { \
        unpack(PACK_##K, tile, g0, n, codes, scales); \
    }
FOR_KINDS(DEFINE_GEMV)

static void gemv_packed(enum pack_kind k, int nr, const uint8_t *tile, int64_t groups, const act_line *a, int64_t stride, int64_t ahead, float *acc) {
    switch (k) {
#define CASE(K) case PACK_##K: gemv_##K(nr, tile, groups, a, stride, ahead, acc); break;
    FOR_KINDS(CASE)
#undef CASE
    default: break;
    }
}

static void unpack_packed(enum pack_kind k, const uint8_t *tile, int64_t g0, int64_t n, uint8_t *codes, float *scales) {
    switch (k) {
#define CASE(K) case PACK_##K: unpack_##K(tile, g0, n, codes, scales); break;
    FOR_KINDS(CASE)
#undef CASE
    default: break;
    }
}

/* GEMM_LIST(X) and the like name the row counts of an instance: X(1) .. X(most) */
#define GEMM_CASE(NR) case NR: gemm(form, top, shift, tiles, NR, codes, scales, n, a, stride, acc); break;
#define DEFINE_GEMM(NAME, FORM, TOP, SHIFT, TILES, LIST) \
    static void NAME(int nr, const uint8_t *codes, const float *scales, int64_t n, const act_line *a, int64_t stride, float *acc) { \
        enum { form = FORM, top = TOP, shift = SHIFT, tiles = TILES }; \
        switch (nr) { LIST(GEMM_CASE) default: break; } \
    }

#if V_SIGNED
DEFINE_GEMM(gemm_s1_15, BW_S1, 15, 3, 1, GEMM_LIST)
DEFINE_GEMM(gemm_s1_31, BW_S1, 31, 4, 1, GEMM_LIST)
DEFINE_GEMM(gemm_s1, BW_S1, 255, -1, 1, GEMM_LIST)
DEFINE_GEMM(gemm_s1m_15, BW_S1M, 15, -1, 1, GEMM_LIST)
DEFINE_GEMM(gemm_s1m_31, BW_S1M, 31, -1, 1, GEMM_LIST)
DEFINE_GEMM(gemm_s1m, BW_S1M, 255, -1, 1, GEMM_LIST)
DEFINE_GEMM(gemm_s2_31, BW_S2, 31, 4, 1, GEMM_LIST2)
DEFINE_GEMM(gemm_s2_63, BW_S2, 63, 5, 1, GEMM_LIST2)
DEFINE_GEMM(gemm_s2, BW_S2, 255, -1, 1, GEMM_LIST2)
DEFINE_GEMM(gemm_s2m, BW_S2M, 255, -1, 1, GEMM_LIST2)
#else
DEFINE_GEMM(gemm_s1, BW_S1, 255, 7, 1, GEMM_LIST)
DEFINE_GEMM(gemm_s1m, BW_S1M, 255, -1, 1, GEMM_LIST)
DEFINE_GEMM(gemm_s2, BW_S2, 255, 7, 1, GEMM_LIST2)
DEFINE_GEMM(gemm_s2m, BW_S2M, 255, -1, 1, GEMM_LIST2)
#if GEMM_TILES == 2
DEFINE_GEMM(gemm_s1_pair, BW_S1, 255, 7, 2, GEMM_PAIR)
DEFINE_GEMM(gemm_s1m_pair, BW_S1M, 255, -1, 2, GEMM_PAIR)
DEFINE_GEMM(gemm_s2_pair, BW_S2, 255, 7, 2, GEMM_PAIR2)
DEFINE_GEMM(gemm_s2m_pair, BW_S2M, 255, -1, 2, GEMM_PAIR2)
#endif
#endif

typedef void gemm_fn(int nr, const uint8_t *codes, const float *scales, int64_t n, const act_line *a, int64_t stride, float *acc);

/* k PACK_NONE: codes of any size from raw rows */
static gemm_fn *gemm_for(enum bw_form form, enum pack_kind k, int tiles) {
    (void)tiles;
#if V_SIGNED
    int top = k == PACK_NONE ? 255 : top_code(k);
    if (form == BW_S1) return top == 15 ? gemm_s1_15 : top == 31 ? gemm_s1_31 : gemm_s1;
    if (form == BW_S1M) return top == 15 ? gemm_s1m_15 : top == 31 ? gemm_s1m_31 : gemm_s1m;
    if (form == BW_S2) return top == 31 ? gemm_s2_31 : top == 63 ? gemm_s2_63 : gemm_s2;
#else
    (void)k;
#if GEMM_TILES == 2
    if (tiles == 2) return form == BW_S1 ? gemm_s1_pair : form == BW_S1M ? gemm_s1m_pair : form == BW_S2 ? gemm_s2_pair : gemm_s2m_pair;
#endif
    if (form == BW_S1) return gemm_s1;
    if (form == BW_S1M) return gemm_s1m;
    if (form == BW_S2) return gemm_s2;
#endif
    return gemm_s2m;
}

/* ---- float weights: tile and panel are [column][16 rows] ---- */

INL int float_size(int k) { return k == PACK_F32 ? 4 : 2; }
INL vf load_weight(int k, const uint8_t *p) {
    return k == PACK_F32 ? v_loadf((const float *)(const void *)p) : k == PACK_F16 ? v_half(p) : v_bf16(p);
}

/* one segment of len columns: acc[nr][16] += p. VH * nr chains of fma; even the single one of a GEMV row keeps up with memory */
INL void float_segment(int k, int nr, const uint8_t *w, int64_t len, const float *x, int64_t stride, float *acc) {
    vf p[VH][16];
    UNROLL for (int h = 0; h < VH; h++) UNROLL for (int r = 0; r < nr; r++) p[h][r] = v_setf(0.0f);
    for (int64_t c = 0; c < len; c++, x += stride, w += CPU_TILE * float_size(k)) {
        UNROLL for (int h = 0; h < VH; h++) {
            vf v = load_weight(k, w + VL * float_size(k) * h);
            UNROLL for (int r = 0; r < nr; r++) p[h][r] = v_fma(v, v_bcastf(x + r), p[h][r]);
        }
    }
    UNROLL for (int h = 0; h < VH; h++) {
        UNROLL for (int r = 0; r < nr; r++) {
            float *y = acc + r * CPU_TILE + VL * h;
            v_storef(y, v_add(v_loadf(y), p[h][r]));
        }
    }
}

INL void float_gemv(int k, int nr, const uint8_t *tile, int64_t cols, const float *x, int64_t stride, float *acc) {
    for (int64_t c = 0; c < cols; c += SEGMENT) {
        int64_t len = cols - c < SEGMENT ? cols - c : SEGMENT;
        float_segment(k, nr, tile + c * CPU_TILE * float_size(k), len, x + c * stride, stride, acc);
    }
}

#define FLOAT_GEMV(K) \
    static void float_gemv_##K(int nr, const uint8_t *tile, int64_t cols, const float *x, int64_t stride, float *acc) { \
        switch (nr) { \
        case 1: float_gemv(PACK_##K, 1, tile, cols, x, stride, acc); break; \
        case 2: float_gemv(PACK_##K, 2, tile, cols, x, stride, acc); break; \
        case 3: float_gemv(PACK_##K, 3, tile, cols, x, stride, acc); break; \
        default: float_gemv(PACK_##K, 4, tile, cols, x, stride, acc); break; \
        } \
    }
FLOAT_GEMV(F32)
FLOAT_GEMV(F16)
FLOAT_GEMV(BF16)

#define FLOAT_CASE(NR) case NR: float_segment(PACK_F32, NR, w, len, x, stride, acc); break;
static void float_gemm(int nr, const uint8_t *w, int64_t len, const float *x, int64_t stride, float *acc) {
    switch (nr) { GEMM_LIST(FLOAT_CASE) default: break; }
}

/* columns [c0, c0 + len) of a packed tile -> f32 panel */
static void float_panel(enum pack_kind k, const uint8_t *tile, int64_t c0, int64_t len, float *panel) {
    for (int64_t i = 0; i < len * CPU_TILE; i += VL) {
        int64_t at = c0 * CPU_TILE + i;
        v_storef(panel + i, k == PACK_F16 ? v_half(tile + 2 * at) : k == PACK_BF16 ? v_bf16(tile + 2 * at)
                                                                   : v_loadf((const float *)(const void *)tile + at));
    }
}

/* ---- one tile ---- */

typedef struct scratch {
    float acc[2][GEMM_TILES][ROW_PANEL][CPU_TILE];
    union {
        struct { uint8_t codes[GEMM_TILES * PANEL_CODES]; float scales[GEMM_TILES * PANEL_SCALES]; } q;
        float panel[SEGMENT * CPU_TILE];
    } w;
} scratch;
_Static_assert(sizeof(scratch) <= CPU_LINEAR_WORK, "work buffer of cpu_linear");

/* activation rows of the next kernel call: at most `most`, never across a block of ACT_BLOCK, pieces of a block of equal size */
static int next_rows(int r, int end, int most) {
    int left = ACT_BLOCK - r % ACT_BLOCK;
    if (end - r < left) left = end - r;
    int pieces = (left + most - 1) / most;
    return (left + pieces - 1) / pieces;
}

/* a matrix with what is worked out once a call */
typedef struct view {
    const cpu_mat *m;
    enum pack_kind k;
    int64_t tile_bytes;
} view;

static view view_of(const cpu_mat *m) {
    enum pack_kind k = pack_kind_of(m->type);
    return (view){m, k, pack_tile_bytes(k, m->cols)};
}

/* Few rows go GEMV_ROWS at a time, straight from the packed tile: what unpacking it again costs, a panel costs too, and a panel is made while memory
 * waits (Zen 4, matrices out of any cache, Q4_K: 8 rows took 65 us through a panel and take 35, 16 rows 91 and 67). */
static bool takes_gemv(const view *v, int r0, int r1) { return v->m->data && r1 - r0 <= GEMV_MOST; }

/* tiles t .. t + nt - 1, nt <= GEMM_TILES; acc[nt][ROW_PANEL][16] */
static void tiles_quant(const view *v, const cpu_act *a, int64_t t, int nt, int r0, int r1, float *acc, scratch *s) {
    int64_t groups = v->m->cols / GROUP, stride;
    const uint8_t *tile = v->m->data ? v->m->data + t * v->tile_bytes : NULL;
    if (takes_gemv(v, r0, r1)) {
        for (int i = 0; i < nt; i++)
            for (int r = r0, nr; r < r1; r += nr) {
                nr = next_rows(r, r1, GEMV_ROWS);
                const act_line *l = act_line_at(a, r, &stride);
                int64_t ahead = r > r0 && r + nr == r1 ? v->tile_bytes : 0;
                gemv_packed(v->k, nr, tile + i * v->tile_bytes, groups, l, stride, ahead, acc + (i * ROW_PANEL + r - r0) * CPU_TILE);
            }
        return;
    }
    enum bw_form form = v->m->type->form;
    gemm_fn *kernel = gemm_for(form, tile ? v->k : PACK_NONE, nt);
    int zero = !V_SIGNED && (form == BW_S1 || form == BW_S2) ? 128 : 0;
    for (int i = 0; i < nt; i++) memset(acc + i * ROW_PANEL * CPU_TILE, 0, (size_t)(r1 - r0) * CPU_TILE * sizeof *acc);
    for (int64_t g = 0; g < groups; g += PANEL_GROUPS) {
        int64_t n = groups - g < PANEL_GROUPS ? groups - g : PANEL_GROUPS;
        for (int i = 0; i < nt; i++) {
            uint8_t *codes = s->w.q.codes + i * PANEL_CODES;
            float *scales = s->w.q.scales + i * PANEL_SCALES;
            if (tile) unpack_packed(v->k, tile + i * v->tile_bytes, g, n, codes, scales);
            else linear_raw_panel(v->m, t + i, g, n, zero, codes, scales);
        }
        for (int r = r0, nr; r < r1; r += nr) {
            nr = next_rows(r, r1, GEMM_ROWS(form) / nt);
            const act_line *l = act_line_at(a, r, &stride);
            kernel(nr, s->w.q.codes, s->w.q.scales, n, l + g * stride, stride, acc + (r - r0) * CPU_TILE);
        }
    }
}

static void tile_float(const view *v, const cpu_act *a, int64_t t, int r0, int r1, float *acc, scratch *s) {
    const cpu_mat *m = v->m;
    enum pack_kind k = v->k;
    int64_t stride;
    const uint8_t *tile = m->data ? m->data + t * v->tile_bytes : NULL;
    memset(acc, 0, (size_t)(r1 - r0) * CPU_TILE * sizeof *acc);
    for (int r = r0, nr; takes_gemv(v, r0, r1) && r < r1; r += nr) {
        nr = next_rows(r, r1, GEMV_ROWS);
        const float *x = act_float_at(a, r, &stride);
        float *to = acc + (r - r0) * CPU_TILE;
        if (k == PACK_F32) float_gemv_F32(nr, tile, m->cols, x, stride, to);
        else if (k == PACK_F16) float_gemv_F16(nr, tile, m->cols, x, stride, to);
        else float_gemv_BF16(nr, tile, m->cols, x, stride, to);
    }
    if (takes_gemv(v, r0, r1)) return;
    for (int64_t c = 0; c < m->cols; c += SEGMENT) {
        int64_t len = m->cols - c < SEGMENT ? m->cols - c : SEGMENT;
        if (tile) float_panel(k, tile, c, len, s->w.panel);
        else linear_raw_floats(m, t, c, len, s->w.panel);
        for (int r = r0, nr; r < r1; r += nr) {
            nr = next_rows(r, r1, GEMM_ROWS(BW_S1));
            const float *x = act_float_at(a, r, &stride);
            float_gemm(nr, (const uint8_t *)s->w.panel, len, x + c * stride, stride, acc + (r - r0) * CPU_TILE);
        }
    }
}

static void tiles_rows(const view *v, const cpu_act *a, int64_t t, int nt, int r0, int r1, float *acc, scratch *s) {
    if (v->m->type->form != BW_FLOAT) tiles_quant(v, a, t, nt, r0, r1, acc, s);
    else
        for (int i = 0; i < nt; i++) tile_float(v, a, t + i, r0, r1, acc + i * ROW_PANEL * CPU_TILE, s);
}

/* ---- epilogue ---- */

/* canon.h's bw_exp, bw_silu and bw_gelu, operation by operation */
INL vf v_exp_canon(vf x) {
    vf z = v_min(v_setf(88.0f), v_max(v_setf(-86.0f), x));
    vf n = v_rint(v_mul(z, v_setf(1.44269504f)));
    vf r = v_fma(v_neg(n), v_setf(0.693145752f), z);
    r = v_fma(v_neg(n), v_setf(1.42860677e-6f), r);
    vf p = v_setf(0.0013926182f);
    p = v_fma(p, r, v_setf(0.008363178f));
    p = v_fma(p, r, v_setf(0.041666556f));
    p = v_fma(p, r, v_setf(0.16666576f));
    p = v_fma(p, r, v_setf(0.5f));
    p = v_fma(p, v_mul(r, r), r);
    p = v_add(p, v_setf(1.0f));
    vf y = v_mul(p, v_asf(v_sll(v_add32(v_int(n), v_set32(127)), 23)));
    return v_zero_below(x, v_setf(-86.0f), y);
}
INL vf v_act(enum cpu_glu_act act, vf g) {
    vf u = g;
    if (act == CPU_GELU) {
        u = v_mul(v_mul(v_setf(0.7978845608f), g), v_fma(v_mul(v_setf(0.044715f), g), g, v_setf(1.0f)));
        u = v_mul(v_setf(2.0f), u);
    }
    return v_div(g, v_add(v_setf(1.0f), v_exp_canon(v_neg(u))));
}

/* one row of a tile: sums -> y[16]; bias and res are full 16 or NULL */
INL void finish_row(const float *acc, float scale, const float *bias, const cpu_epi *e, const float *res, const float *gate, float gscale,
                    const float *gbias, float *y) {
    UNROLL for (int i = 0; i < CPU_TILE; i += VL) {
        vf v = v_mul(v_loadf(acc + i), v_setf(scale));
        if (bias) v = v_add(v, v_loadf(bias + i));
        if (res) v = v_add(v_loadf(res + i), v);
        if (gate) {
            vf g = v_mul(v_loadf(gate + i), v_setf(gscale));
            if (gbias) g = v_add(g, v_loadf(gbias + i));
            v = v_mul(v_act(e->act, g), v);
        }
        v_storef(y + i, v);
    }
}

/* pointer to 16 readable values of which n are src's */
static const float *padded(const float *src, int n, float *tmp) {
    if (!src || n == CPU_TILE) return src;
    memset(tmp, 0, CPU_TILE * sizeof *tmp);
    memcpy(tmp, src, (size_t)n * sizeof *tmp);
    return tmp;
}

/* tile t, whose sums are number i of the scratch */
static void finish(const cpu_mat *m, const cpu_epi *e, int64_t t, int i, int r0, int r1, const scratch *s, float *y, int64_t ldy) {
    float tb[16], tg[16], tr[16], ty[16];
    const cpu_mat *gm = e && e->mode == CPU_GLU ? e->gate : NULL;
    int64_t first = t * CPU_TILE;
    int n = m->rows - first < CPU_TILE ? (int)(m->rows - first) : CPU_TILE;
    const float *bias = padded(m->bias ? m->bias + first : NULL, n, tb);
    const float *gbias = padded(gm && gm->bias ? gm->bias + first : NULL, n, tg);
    for (int r = r0; r < r1; r++) {
        const float *res = e && e->mode == CPU_ADD ? padded(e->res + r * e->ldres + first, n, tr) : NULL;
        const float *gate = gm ? s->acc[1][i][r - r0] : NULL;
        float *out = y + r * ldy + first;
        finish_row(s->acc[0][i][r - r0], m->scale, bias, e, res, gate, gm ? gm->scale : 1.0f, gbias, n == CPU_TILE ? out : ty);
        if (n < CPU_TILE) memcpy(out, ty, (size_t)n * sizeof *ty);
    }
}

/* activation rows that stay in the second-level cache (1 MiB of it on Zen 4, 2 MiB on later cores) while the tiles pass by */
static int panel_rows(int64_t cols) {
    int64_t blocks = PANEL_BYTES / (ACT_BLOCK * cols / GROUP * (int64_t)sizeof(act_line));
    return ACT_BLOCK * (int)(blocks < 2 ? 2 : blocks > ROW_PANEL / ACT_BLOCK ? ROW_PANEL / ACT_BLOCK : blocks);
}

void LINEAR_FN(const cpu_mat *m, const cpu_act *a, int r0, int r1, float *y, int64_t ldy, int64_t t0, int64_t t1, const cpu_epi *e,
               void *work) {
    scratch *s = work;
    int glu = e && e->mode == CPU_GLU, panel = panel_rows(m->cols);
    view v = view_of(m), gate = view_of(glu ? e->gate : m);
    for (int r = r0, end; r < r1; r = end) {
        end = r - r % ACT_BLOCK + panel < r1 ? r - r % ACT_BLOCK + panel : r1;
        for (int64_t t = t0, nt; t < t1; t += nt) {
            nt = t1 - t < GEMM_TILES ? t1 - t : GEMM_TILES;
            tiles_rows(&v, a, t, (int)nt, r, end, s->acc[0][0][0], s);
            if (glu) tiles_rows(&gate, a, t, (int)nt, r, end, s->acc[1][0][0], s);
            for (int i = 0; i < nt; i++) finish(m, e, t + i, i, r, end, s, y, ldy);
        }
    }
}

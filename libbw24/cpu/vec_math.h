/* The elementary functions of canon.h on vectors, operation by operation the same, so that every lane has the scalar function's bits
 * for every finite argument (and for infinities). Included by vec.h once per set of names; V(name) and VW are defined. */

VEC_FN V(f) V(exp2)(V(f) x) {
    V(f) z = V(max)(V(min)(x, V(set1)(127.0f)), V(set1)(-125.0f));
    V(f) n = V(rint)(z), f = V(sub)(z, n);
    V(f) p = V(set1)(0.00015453163f);
    p = V(fma)(p, f, V(set1)(0.0013390863f));
    p = V(fma)(p, f, V(set1)(0.009618083f));
    p = V(fma)(p, f, V(set1)(0.05550357f));
    p = V(fma)(p, f, V(set1)(0.24022651f));
    p = V(fma)(p, f, V(set1)(0.6931472f));
    p = V(fma)(p, f, V(set1)(1.0f));
    return V(unless_lt)(x, -125.0f, V(mul)(p, V(pow2)(V(cvt)(n))));
}

VEC_FN V(f) V(exp)(V(f) x) {
    V(f) z = V(max)(V(min)(x, V(set1)(88.0f)), V(set1)(-86.0f));
    V(f) n = V(rint)(V(mul)(z, V(set1)(1.44269504f)));
    V(f) r = V(fnma)(n, V(set1)(0.693145752f), z);
    r = V(fnma)(n, V(set1)(1.42860677e-6f), r);
    V(f) p = V(set1)(0.0013926182f);
    p = V(fma)(p, r, V(set1)(0.008363178f));
    p = V(fma)(p, r, V(set1)(0.041666556f));
    p = V(fma)(p, r, V(set1)(0.16666576f));
    p = V(fma)(p, r, V(set1)(0.5f));
    p = V(fma)(p, V(mul)(r, r), r);
    p = V(add)(p, V(set1)(1.0f));
    return V(unless_lt)(x, -86.0f, V(mul)(p, V(pow2)(V(cvt)(n))));
}

VEC_FN V(f) V(sigmoid)(V(f) x) {
    V(f) one = V(set1)(1.0f);
    return V(div)(one, V(add)(one, V(exp)(V(neg)(x))));
}

VEC_FN V(f) V(silu)(V(f) x) { return V(div)(x, V(add)(V(set1)(1.0f), V(exp)(V(neg)(x)))); }

VEC_FN V(f) V(gelu)(V(f) x) {
    V(f) w = V(fma)(V(mul)(V(set1)(0.044715f), x), x, V(set1)(1.0f));
    V(f) u = V(mul)(V(mul)(V(set1)(0.7978845608f), x), w);
    return V(div)(x, V(add)(V(set1)(1.0f), V(exp)(V(mul)(V(set1)(-2.0f), u))));
}

VEC_FN V(f) V(tanh)(V(f) x) {
    V(f) one = V(set1)(1.0f);
    V(f) t = V(exp)(V(mul)(V(set1)(-2.0f), V(abs)(x)));
    return V(neg_if)(x, V(div)(V(sub)(one, t), V(add)(one, t)));
}

/* tree32 of 32 values in 32 / VW vectors */
VEC_FN float V(tree32)(const V(f) *v) {
#if VW == 16
    return V(hsum)(V(add)(v[0], v[1]));
#else
    return V(hsum)(V(add)(V(add)(v[0], v[2]), V(add)(v[1], v[3])));
#endif
}

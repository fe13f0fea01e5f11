// The kernels that choose tokens from logits; part of kernels_impl.h, which includes this.

// x * 0 is 0 unless x is infinite or NaN.
float peak(const float* x, int n) {
  F top = set1(-INFINITY), zero = set1(0);
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const F a = load(x + i);
    top = max(top, a);
    zero = fma(a, set1(0), zero);
  }
  if (i < n) {
    top = max(top, load_part(x + i, n - i, -INFINITY));
    zero = fma(load_part(x + i, n - i, 0), set1(0), zero);
  }
  return sum_lanes(zero) == 0 ? max_lanes(top) : NAN;
}

void lane_peaks(const float* x, int n, float* peaks) {
  F top = set1(-INFINITY);
  int i = 0;
  for (; i + 16 <= n; i += 16) top = max(top, load(x + i));
  if (i < n) top = max(top, load_part(x + i, n - i, -INFINITY));
  store(peaks, top);
}

// e^-87, where exp() ends, and what is little more counts as zero.
constexpr float kLightest = 2e-38f;

float weigh(const float* x, int n, const Weighing& by, float* weights) {
  const F highest = set1(by.highest), temperature = set1(by.temperature), inverse = set1(1.0f / by.temperature);
  // Far enough to weigh nothing, near enough for the division to stay finite.
  const F lowest = set1(-100.0f * by.temperature), lightest = set1(by.min_p > kLightest ? by.min_p : kLightest);
  const auto weight = [&](F a) {
    const F below = max(sub(a, highest), lowest), about = mul(below, inverse);
    const F rest = fma(sub(set1(0), about), temperature, below);  // a division, but in less time
    return keep_from(exp(fma(rest, inverse, about)), lightest);
  };
  F sum = set1(0);
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const F w = weight(load(x + i));
    store(weights + i, w);
    sum = add(sum, w);
  }
  if (i < n) {
    const F w = weight(load_part(x + i, n - i, -INFINITY));
    store_part(weights + i, n - i, w);
    sum = add(sum, w);
  }
  return sum_lanes(sum);
}

int find_from(const float* x, int n, float bound, int32_t* found) {
  int count = 0;
  for (int i = 0; i < n; i += 32) {
    const int stop = i + 32 < n ? i + 32 : n;
    if (stop == i + 32 && max_of(load(x + i), load(x + i + 16)) < bound) continue;
    for (int j = i; j < stop; j++)
      if (x[j] >= bound) found[count++] = j;
  }
  return count;
}

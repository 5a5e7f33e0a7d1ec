//! The dynamic 8-bit type (arXiv 1511.04561), in which bitsandbytes keeps scales: a sign, an exponent of base
//! ten whose length varies, and a fraction in what bits are left.

use std::sync::LazyLock;

/// Values, ascending.
pub(super) static VALUES: LazyLock<[f32; 256]> = LazyLock::new(|| {
    let mut values = vec![0.0, 1.0];
    for exponent in 0..7 {
        // The middles of so many equal parts of [0.1, 1], in the arithmetic of torch's linspace: fused, and
        // from the nearer end.
        let parts: usize = 1 << exponent;
        let step = (1.0f32 - 0.1) / parts as f32;
        let border = |at: usize| {
            if at < parts.div_ceil(2) {
                step.mul_add(at as f32, 0.1)
            } else {
                (-step).mul_add((parts - at) as f32, 1.0)
            }
        };
        let power = 10f64.powi(exponent - 6) as f32;
        values.extend((0..parts).flat_map(|part| {
            let middle = power * ((border(part) + border(part + 1)) / 2.0);
            [middle, -middle]
        }));
    }
    values.sort_by(f32::total_cmp);
    values.try_into().expect("127 of each sign, nothing and one")
});

/// What lies between each value and the next.
static BORDERS: LazyLock<[f32; 255]> =
    LazyLock::new(|| std::array::from_fn(|at| (VALUES[at] + VALUES[at + 1]) / 2.0));

/// The code of the nearest value.
pub(super) fn nearest(value: f32) -> u8 {
    BORDERS.partition_point(|border| *border < value) as u8
}

//! The dynamic 8-bit type (arXiv 1511.04561), in which bitsandbytes keeps scales: a sign, an exponent of base
//! ten whose length varies, and a fraction in what bits are left.

use std::sync::LazyLock;

/// Its values, ascending.
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

/// The code of the nearest value, and of two that are as near the lesser. Distances are compared as they are
/// rounded, as bitsandbytes' kernel for CPUs does.
pub(super) fn nearest(value: f32) -> u8 {
    let above = VALUES.partition_point(|other| *other <= value).min(255);
    let below = above.saturating_sub(1);
    let is_above = (VALUES[above] - value).abs() < (value - VALUES[below]).abs();
    if is_above { above as u8 } else { below as u8 }
}

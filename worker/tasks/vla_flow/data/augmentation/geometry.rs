//! Changes of place, as torchvision's `affine` (nearest pixels, black outside) and `resized_crop` (bilinear)
//! compute them. The size stays.

use super::picture::Picture;

/// A rotation with shift, scale and shear about the centre.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Motion {
    /// Clockwise, in degrees.
    pub(super) angle: f64,
    /// To the right and down, in pixels.
    pub(super) shift: [i64; 2],
    pub(super) scale: f64,
    /// Along rows, in degrees.
    pub(super) shear: f64,
}

/// A part of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) top: usize,
    pub(super) left: usize,
    pub(super) height: usize,
    pub(super) width: usize,
}

pub(super) fn affine(picture: &mut Picture, motion: Motion) {
    let Motion { angle, shift: [right, down], scale, shear } = motion;
    // The inverse of translation, rotation, scale and shear `[[a, b], [c, d]]`, whose determinant is 1 but
    // for the scale.
    let (angle, shear) = (angle.to_radians(), shear.to_radians().tan());
    let (a, c) = (angle.cos(), angle.sin());
    let (b, d) = (-(a * shear + c), a - c * shear);
    let [to_x, to_y] = [[d / scale, -b / scale], [-c / scale, a / scale]];
    let before = picture.clone();
    let (middle_x, middle_y) = ((before.width as f64 - 1.0) / 2.0, (before.height as f64 - 1.0) / 2.0);
    for (at, pixel) in picture.pixels.iter_mut().enumerate() {
        let x = (at % before.width) as f64 - middle_x - right as f64;
        let y = (at / before.width) as f64 - middle_y - down as f64;
        let from_x = (to_x[0] * x + to_x[1] * y + middle_x).round_ties_even();
        let from_y = (to_y[0] * x + to_y[1] * y + middle_y).round_ties_even();
        let inside =
            (0.0..before.width as f64).contains(&from_x) && (0.0..before.height as f64).contains(&from_y);
        *pixel = if inside { before.row(from_y as usize)[from_x as usize] } else { [0.0; 3] };
    }
}

/// A part at the size of the whole.
pub(super) fn resized_crop(picture: &mut Picture, part: Part) {
    let Part { top, left, height, width } = part;
    let rows = (top..top + height).flat_map(|y| along(&picture.row(y)[left..left + width], picture.width));
    let narrow: Vec<_> = rows.collect();
    let columns = taps(height, picture.height);
    for (row, (first, second, weight)) in picture.pixels.chunks_exact_mut(picture.width).zip(columns) {
        let pair = [first, second].map(|y| &narrow[y * picture.width..][..picture.width]);
        for (pixel, (a, b)) in row.iter_mut().zip(pair[0].iter().zip(pair[1])) {
            *pixel = between(*a, *b, weight);
        }
    }
}

fn along(row: &[[f32; 3]], width: usize) -> Vec<[f32; 3]> {
    taps(row.len(), width).map(|(first, second, weight)| between(row[first], row[second], weight)).collect()
}

fn between(a: [f32; 3], b: [f32; 3], weight: f32) -> [f32; 3] {
    std::array::from_fn(|channel| a[channel] * (1.0 - weight) + b[channel] * weight)
}

/// The two input pixels around each output pixel, and the weight of the second. The output has at least as
/// many.
fn taps(input: usize, output: usize) -> impl Iterator<Item = (usize, usize, f32)> {
    let scale = input as f64 / output as f64;
    (0..output).map(move |pixel| {
        let place = ((pixel as f64 + 0.5) * scale - 0.5).max(0.0);
        let first = place as usize;
        (first, (first + 1).min(input - 1), (place - first as f64) as f32)
    })
}

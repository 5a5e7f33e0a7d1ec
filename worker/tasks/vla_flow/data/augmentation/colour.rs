//! Changes of colours, each as torchvision's function of its name computes it on floats (`v2.functional`).
//!
//! | | formula, each followed by a clamp to `[0, 1]` |
//! |---|---|
//! | brightness | `f x` |
//! | contrast | `f x + (1 - f) mean(grey)` |
//! | saturation | `f x + (1 - f) grey` |
//! | sharpness | `x + (1 - f) (smooth(x) - x)`, the border as it is |
//!
//! `grey = 0.2989 r + 0.587 g + 0.114 b`; `smooth` is a 3 x 3 kernel of ones around a 5, divided by 13.

use super::picture::Picture;

pub(super) fn brightness(picture: &mut Picture, factor: f64) {
    let factor = factor as f32;
    each(picture, |pixel| pixel.map(|value| factor * value));
}

pub(super) fn contrast(picture: &mut Picture, factor: f64) {
    let sum: f64 = picture.pixels.iter().map(|pixel| f64::from(grey(*pixel))).sum();
    let mean = (sum / picture.pixels.len().max(1) as f64) as f32;
    each(picture, |pixel| blend(pixel, mean, factor));
}

pub(super) fn saturation(picture: &mut Picture, factor: f64) {
    each(picture, |pixel| blend(pixel, grey(pixel), factor));
}

/// Pictures of two rows or columns have nothing but border.
pub(super) fn sharpness(picture: &mut Picture, factor: f64) {
    let (height, width, rest) = (picture.height, picture.width, (1.0 - factor) as f32);
    if height <= 2 || width <= 2 {
        return;
    }
    let before = picture.clone();
    for y in 1..height - 1 {
        let rows = [y - 1, y, y + 1].map(|y| before.row(y));
        for x in 1..width - 1 {
            let pixel = &mut picture.pixels[y * width + x];
            for (channel, value) in pixel.iter_mut().enumerate() {
                let around: f32 = rows.iter().flat_map(|row| &row[x - 1..x + 2]).map(|p| p[channel]).sum();
                let smooth = around / 13.0 + *value * (4.0 / 13.0);
                *value += rest * (smooth - *value);
            }
        }
    }
    each(picture, |pixel| pixel);
}

/// Turns hues by so much of the circle.
pub(super) fn hue(picture: &mut Picture, factor: f64) {
    let factor = factor as f32;
    each(picture, |pixel| {
        let [hue, saturation, value] = hsv(pixel);
        rgb([(hue + factor).rem_euclid(1.0), saturation, value])
    });
}

fn each(picture: &mut Picture, change: impl Fn([f32; 3]) -> [f32; 3]) {
    for pixel in &mut picture.pixels {
        *pixel = change(*pixel).map(|value| value.clamp(0.0, 1.0));
    }
}

fn grey([r, g, b]: [f32; 3]) -> f32 {
    r * 0.2989 + g * 0.587 + b * 0.114
}

fn blend(pixel: [f32; 3], other: f32, factor: f64) -> [f32; 3] {
    pixel.map(|value| value * factor as f32 + other * (1.0 - factor) as f32)
}

/// Hue, saturation and value; hue in turns from red, 0 where there is none.
fn hsv([r, g, b]: [f32; 3]) -> [f32; 3] {
    let (low, high) = (r.min(g).min(b), r.max(g).max(b));
    let range = high - low;
    if range == 0.0 {
        return [0.0, 0.0, high];
    }
    let [rc, gc, bc] = [r, g, b].map(|value| (high - value) / range);
    let sixths = match high {
        _ if high == r => bc - gc,
        _ if high == g => rc + 2.0 - bc,
        _ => gc + 4.0 - rc,
    };
    [(sixths / 6.0 + 1.0) % 1.0, range / high, high]
}

fn rgb([hue, saturation, value]: [f32; 3]) -> [f32; 3] {
    let sixths = hue * 6.0;
    let sector = sixths.floor();
    let within = sixths - sector;
    let low = value * (1.0 - saturation);
    let falling = value * (1.0 - saturation * within);
    let rising = value * (1.0 - saturation * (1.0 - within));
    match (sector as i32).rem_euclid(6) {
        0 => [value, rising, low],
        1 => [falling, value, low],
        2 => [low, value, rising],
        3 => [low, falling, value],
        4 => [rising, low, value],
        _ => [value, low, falling],
    }
}

//! Held-out samples beside what was predicted of them, for people: `samples.json` of a run's directory.

use serde::Serialize;

/// Longest side of a picture that is kept.
const MOST_PIXELS: usize = 224;

/// One sample, with what a task has to show of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Example {
    /// Index in the data set.
    pub sample: u64,
    /// What it is: an instruction, a name.
    pub title: String,
    /// What was seen, or spectra.
    pub pictures: Vec<ExamplePicture>,
    /// Numbers, one after the other.
    pub curves: Vec<CurvePair>,
    /// Words.
    pub texts: Vec<TextPair>,
}

/// A picture.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExamplePicture {
    /// What it shows.
    pub name: String,
    /// The file of a PNG, as base64.
    pub png: String,
}

/// A curve beside the predicted one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CurvePair {
    /// What it is of.
    pub name: String,
    /// As recorded.
    pub reference: Vec<f32>,
    /// As predicted.
    pub predicted: Vec<f32>,
}

/// A text beside the predicted one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TextPair {
    /// What it answers.
    pub name: String,
    /// As recorded.
    pub reference: String,
    /// As predicted.
    pub predicted: String,
}

impl ExamplePicture {
    /// From `[height, width, 3]` bytes, made smaller by leaving pixels out where a side is long; none if they
    /// are not as many as that.
    pub fn of_rgb(name: String, [height, width]: [usize; 2], rgb: &[u8]) -> Option<Self> {
        let pixels = rgb.as_chunks::<3>().0;
        if height == 0 || width == 0 || pixels.len() != height * width {
            return None;
        }
        let every = height.max(width).div_ceil(MOST_PIXELS);
        let rows = pixels.chunks_exact(width).step_by(every);
        let kept: Vec<u8> = rows.flat_map(|row| row.iter().step_by(every)).flatten().copied().collect();
        let [height, width] = [height, width].map(|side| side.div_ceil(every) as u32);
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, width, height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header().ok()?;
        writer.write_image_data(&kept).ok()?;
        writer.finish().ok()?;
        Some(Self { name, png: base64::Engine::encode(&base64::prelude::BASE64_STANDARD, &file) })
    }

    /// From decibels, column by column with the lowest first, 80 below the loudest being black; `rows` values
    /// a column.
    pub fn of_spectrum(name: String, rows: usize, decibels: &[f32]) -> Option<Self> {
        const RANGE: f32 = 80.0;
        let columns = decibels.len() / rows.max(1);
        let loudest = decibels.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let shade = |row: usize, column: usize| {
            let level = decibels[column * rows + rows - 1 - row] - loudest;
            let level = (1.0 + level / RANGE).clamp(0.0, 1.0);
            // Black, violet, orange, white: each channel rises after the one before.
            [
                1.5 * level,
                2.0 * level - 0.8,
                (1.2 * level).min(0.6) * (1.0 - level) * 2.0 + (3.0 * level - 2.0).max(0.0),
            ]
            .map(|channel| (255.0 * channel.clamp(0.0, 1.0)) as u8)
        };
        let pixels = (0..rows).flat_map(|row| (0..columns).flat_map(move |column| shade(row, column)));
        Self::of_rgb(name, [rows, columns], &pixels.collect::<Vec<u8>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_is_a_png_of_at_most_so_many_pixels() {
        let rgb: Vec<u8> = (0..480 * 640 * 3).map(|byte| (byte % 251) as u8).collect();
        let picture = ExamplePicture::of_rgb("camera".into(), [480, 640], &rgb).unwrap();
        let file = base64::Engine::decode(&base64::prelude::BASE64_STANDARD, picture.png).unwrap();
        let decoded = png::Decoder::new(std::io::Cursor::new(file)).read_info().unwrap();
        assert_eq!((decoded.info().width, decoded.info().height), (214, 160));
        assert_eq!(ExamplePicture::of_rgb("cut".into(), [480, 640], &rgb[1..]), None);
        assert_eq!(ExamplePicture::of_rgb("empty".into(), [0, 0], &[]), None);
        let silence = ExamplePicture::of_spectrum("silence".into(), 4, &[f32::NEG_INFINITY; 12]);
        assert!(silence.is_some() && ExamplePicture::of_spectrum("none".into(), 4, &[]).is_none());
    }
}

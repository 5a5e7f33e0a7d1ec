//! An episode as one picture: a strip of frames for each camera, a plot for each feature of numbers.
//!
//! ```text
//! episode 3: push the button
//! observation.images.front, 84 x 84
//! [frame 0] [frame 12] [frame 25] ...
//! action                                     0 1 2 3      dimensions, by colour
//! max ┌──────────────────────────┐
//! min └──────────────────────────┘                        a faint line at each frame shown
//! ```

use std::convert::Infallible;

use coxswain_data::{
    pixels::Pixels,
    preview::{Plot, Preview, Strip},
};
use embedded_graphics::{
    mono_font::{MonoFont, MonoTextStyle, ascii},
    pixelcolor::Rgb888,
    prelude::*,
    primitives::{Polyline, PrimitiveStyle, Rectangle},
    text::Text,
};

const MARGIN: i32 = 12;
const GAP: i32 = 6;
/// Space of labels left of a plot.
const LABELS: i32 = 70;
const PLOT_HEIGHT: i32 = 160;
/// A strip is at most so wide, where its pictures do not make it so.
const WIDTH: usize = 1600;
/// Pictures narrower than this are drawn larger, by a whole number.
const SMALL: usize = 120;
const TITLE: MonoFont<'_> = ascii::FONT_9X15_BOLD;
const LABEL: MonoFont<'_> = ascii::FONT_6X10;
const INK: Rgb888 = Rgb888::new(20, 20, 30);
const GREY: Rgb888 = Rgb888::new(170, 170, 180);
const FAINT: Rgb888 = Rgb888::new(228, 228, 234);
/// Okabe and Ito's colours, which those who see few colours can tell apart; then once more, darker.
const COLOURS: [[u8; 3]; 8] = [
    [0, 114, 178],
    [213, 94, 0],
    [0, 158, 115],
    [204, 121, 167],
    [230, 159, 0],
    [86, 180, 233],
    [120, 94, 240],
    [90, 90, 90],
];

/// The sheet as a PNG file.
pub fn sheet(preview: &Preview) -> Vec<u8> {
    let count = preview.frames.len().max(1);
    let strips: Vec<Vec<Pixels>> = preview.strips.iter().map(|strip| scaled(strip, count)).collect();
    let wide = |strip: &Vec<Pixels>| strip.iter().map(|one| one.width as i32 + GAP).sum::<i32>();
    let width = strips.iter().map(wide).max().unwrap_or(0).max(LABELS + 640) + 2 * MARGIN;
    let tall = |strip: &Vec<Pixels>| strip.iter().map(|one| one.height as i32).max().unwrap_or(0) + 44;
    let plots = preview.plots.len() as i32 * (PLOT_HEIGHT + 44);
    let mut canvas = Canvas::new(width, 2 * MARGIN + 24 + strips.iter().map(tall).sum::<i32>() + plots);
    let mut y = MARGIN;
    canvas.text(&TITLE, MARGIN, y, INK, &preview.title);
    y += 24;
    for (strip, pictures) in preview.strips.iter().zip(&strips) {
        canvas.text(&LABEL, MARGIN, y, INK, &strip.title);
        let mut x = MARGIN;
        for (picture, frame) in pictures.iter().zip(&preview.frames) {
            canvas.paste(x, y + 14, picture);
            canvas.text(&LABEL, x, y + 16 + picture.height as i32, INK, &format!("frame {frame}"));
            x += picture.width as i32 + GAP;
        }
        y += tall(pictures);
    }
    for plot in &preview.plots {
        canvas.plot(y, plot, &preview.frames);
        y += PLOT_HEIGHT + 44;
    }
    canvas.png()
}

/// Pictures of a strip at the size that they are drawn in.
fn scaled(strip: &Strip, count: usize) -> Vec<Pixels> {
    let room = (WIDTH / count).max(32);
    let scale = |picture: &Pixels| match picture.width {
        0 => picture.clone(),
        width if width > room => reduced(picture, width.div_ceil(room)),
        width if width < SMALL => enlarged(picture, SMALL.min(room).div_ceil(width).max(1)),
        _ => picture.clone(),
    };
    strip.pictures.iter().map(scale).collect()
}

/// Means of squares of so many pixels a side.
fn reduced(picture: &Pixels, by: usize) -> Pixels {
    let (height, width) = ((picture.height / by).max(1), picture.width / by);
    let mut rgb = Vec::with_capacity(height * width * 3);
    for y in 0..height {
        for x in 0..width {
            for channel in 0..3 {
                let rows = y * by..((y + 1) * by).min(picture.height);
                let square = rows.flat_map(|row| (x * by..(x + 1) * by).map(move |column| (row, column)));
                let values =
                    square.map(|(row, column)| picture.rgb[(row * picture.width + column) * 3 + channel]);
                let (sum, count) =
                    values.fold((0, 0), |(sum, count), value| (sum + u32::from(value), count + 1));
                rgb.push((sum / count.max(1)) as u8);
            }
        }
    }
    Pixels { height, width, rgb }
}

/// Every pixel as a square.
fn enlarged(picture: &Pixels, times: usize) -> Pixels {
    let (height, width) = (picture.height * times, picture.width * times);
    let pixel = |at: usize| {
        let from = (at / width / times * picture.width + at % width / times) * 3;
        [picture.rgb[from], picture.rgb[from + 1], picture.rgb[from + 2]]
    };
    Pixels { height, width, rgb: (0..height * width).flat_map(pixel).collect() }
}

struct Canvas {
    width: i32,
    height: i32,
    rgb: Vec<u8>,
}

impl OriginDimensions for Canvas {
    fn size(&self) -> Size {
        Size::new(self.width as u32, self.height as u32)
    }
}

impl DrawTarget for Canvas {
    type Color = Rgb888;
    type Error = Infallible;

    fn draw_iter<I: IntoIterator<Item = Pixel<Rgb888>>>(&mut self, pixels: I) -> Result<(), Infallible> {
        for Pixel(Point { x, y }, colour) in pixels {
            if (0..self.width).contains(&x) && (0..self.height).contains(&y) {
                let at = (y as usize * self.width as usize + x as usize) * 3;
                self.rgb[at..at + 3].copy_from_slice(&[colour.r(), colour.g(), colour.b()]);
            }
        }
        Ok(())
    }
}

impl Canvas {
    fn new(width: i32, height: i32) -> Self {
        Self { width, height, rgb: vec![255; width as usize * height as usize * 3] }
    }

    fn draw(&mut self, what: &impl Drawable<Color = Rgb888>) {
        // Nothing that is drawn here can fail.
        let Ok(_) = what.draw(self);
    }

    /// A line of text whose upper left corner is here. The font has no letters beyond ASCII.
    fn text(&mut self, font: &MonoFont<'_>, x: i32, y: i32, colour: Rgb888, text: &str) {
        let text: String = text.chars().map(|letter| if letter.is_ascii() { letter } else { '?' }).collect();
        let at = Point::new(x, y + font.baseline as i32);
        self.draw(&Text::new(&text, at, MonoTextStyle::new(font, colour)));
    }

    fn paste(&mut self, x: i32, y: i32, picture: &Pixels) {
        for (row, pixels) in picture.rgb.chunks_exact(picture.width.max(1) * 3).enumerate() {
            let at = ((y as usize + row) * self.width as usize + x as usize) * 3;
            self.rgb[at..at + pixels.len()].copy_from_slice(pixels);
        }
    }

    fn plot(&mut self, y: i32, plot: &Plot, frames: &[u64]) {
        self.text(&LABEL, MARGIN, y, INK, &plot.title);
        let mut x = MARGIN + 6 * plot.title.len() as i32 + 18;
        for dim in 0..plot.series.len() {
            let name = dim.to_string();
            self.text(&LABEL, x, y, colour(dim), &name);
            x += 6 * (name.len() as i32 + 1);
        }
        let corner = Point::new(MARGIN + LABELS, y + 14);
        let size = Size::new((self.width - 2 * MARGIN - LABELS) as u32, PLOT_HEIGHT as u32);
        let finite = || plot.series.iter().flatten().copied().filter(|value| value.is_finite());
        let (low, high) =
            (finite().fold(f32::INFINITY, f32::min), finite().fold(f32::NEG_INFINITY, f32::max));
        if low > high {
            return self.text(&LABEL, MARGIN, corner.y, INK, "no finite number");
        }
        let range = if high > low { high - low } else { 1.0 };
        let length = plot.series.iter().map(Vec::len).max().unwrap_or(0);
        let across = |frame: usize| {
            corner.x + (frame as f32 / (length.max(2) - 1) as f32 * (size.width - 1) as f32) as i32
        };
        let up = |value: f32| corner.y + ((high - value) / range * (size.height - 1) as f32) as i32;
        for frame in frames {
            let x = across(*frame as usize);
            let ends = [Point::new(x, corner.y), Point::new(x, corner.y + PLOT_HEIGHT - 1)];
            self.draw(&Polyline::new(&ends).into_styled(PrimitiveStyle::with_stroke(FAINT, 1)));
            self.text(&LABEL, x - 6, corner.y + PLOT_HEIGHT + 3, INK, &frame.to_string());
        }
        self.draw(&Rectangle::new(corner, size).into_styled(PrimitiveStyle::with_stroke(GREY, 1)));
        self.text(&LABEL, MARGIN, corner.y, INK, &number(high));
        self.text(&LABEL, MARGIN, corner.y + PLOT_HEIGHT - 10, INK, &number(low));
        for (dim, values) in plot.series.iter().enumerate() {
            // A line stops where a number is none.
            let there: Vec<(usize, &f32)> = values.iter().enumerate().collect();
            for part in there.split(|(_, value)| !value.is_finite()) {
                let points: Vec<Point> =
                    part.iter().map(|(frame, value)| Point::new(across(*frame), up(**value))).collect();
                self.draw(&Polyline::new(&points).into_styled(PrimitiveStyle::with_stroke(colour(dim), 1)));
            }
        }
    }

    fn png(self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, self.width as u32, self.height as u32);
        encoder.set_color(png::ColorType::Rgb);
        let written = encoder.write_header().and_then(|mut writer| writer.write_image_data(&self.rgb));
        written.expect("a vector takes all bytes, and there are as many as the header says");
        bytes
    }
}

fn number(value: f32) -> String {
    if value != 0.0 && !(1e-3..1e6).contains(&value.abs()) {
        format!("{value:.2e}")
    } else {
        format!("{value:.3}")
    }
}

fn colour(dim: usize) -> Rgb888 {
    let darker = (dim / COLOURS.len() + 1).min(3) as u8;
    let [r, g, b] = COLOURS[dim % COLOURS.len()].map(|channel| channel / darker);
    Rgb888::new(r, g, b)
}

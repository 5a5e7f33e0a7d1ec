//! An episode as training sees it, for `cox data preview`: pictures as they enter the model, numbers as they
//! are normalised.

use coxswain_data::{
    DataError,
    pixels::Pixels,
    preview::{Plot, Preview, Strip, spread},
};
use coxswain_models::pretrained::pictures::{ImageProcessor, ImageShape, Rgb};

use super::{Dataset, Sample, dataset::Camera};

impl Dataset {
    /// Episode `number`, with so many of its frames.
    pub fn preview(&self, number: u64, frames: usize) -> Result<Preview, DataError> {
        let samples = self.episode_samples(number)?;
        let frames = spread(samples.end - samples.start, frames);
        let strip = |camera: &Camera, back: u64| {
            let of = if back > 0 { format!(", {back} frames before") } else { String::new() };
            Strip { title: camera.name.clone() + &of, pictures: Vec::new() }
        };
        let seen = self.settings.observation.rows_back();
        let mut strips: Vec<Strip> =
            seen.flat_map(|back| self.cameras.iter().map(move |camera| strip(camera, back))).collect();
        for frame in &frames {
            let sample = self.sample_in_epoch(samples.start + frame, 0)?;
            for (strip, picture) in strips.iter_mut().zip(pictures(&*self.images, &sample)) {
                let Rgb { height, width, pixels } = picture;
                strip.pictures.push(Pixels { height, width, rgb: pixels });
            }
        }
        for strip in &mut strips {
            if let Some(Pixels { height, width, .. }) = strip.pictures.first() {
                strip.title += &format!(" as training sees it, {width} x {height}");
            }
        }
        let mut plots = [&self.state, &self.action]
            .map(|of| Plot { title: format!("{}, normalised", of.name), series: vec![Vec::new(); of.width] });
        let past = self.dims.state - self.state.width;
        for index in samples.clone() {
            let sample = self.sample_unseen(index)?;
            // Of a chunk of actions the first is that of its frame, of the states the last.
            for (plot, values) in plots.iter_mut().zip([&sample.state[past..], &sample.actions[..]]) {
                plot.series.iter_mut().zip(values).for_each(|(series, value)| series.push(*value));
            }
        }
        let plots = plots.into_iter().filter(|plot| !plot.series.is_empty()).collect();
        Ok(Preview { title: title(self, number, samples.start), frames, strips, plots })
    }
}

fn title(dataset: &Dataset, number: u64, first: u64) -> String {
    let held_out =
        if dataset.holdout_episodes().any(|held_out| held_out == number) { ", held out" } else { "" };
    let task = dataset.at(first).and_then(|at| at.task()).unwrap_or_default();
    format!("episode {number}{held_out}: {task}")
}

/// What each camera shows in a sample, as it enters the model; the oldest frame of its history first.
pub(super) fn pictures(images: &dyn ImageProcessor, sample: &Sample) -> Vec<Rgb> {
    let mut rest = &sample.pixel_values[..];
    let picture = |shape: &ImageShape| {
        let (mine, others) = rest.split_at(images.patches().values(*shape));
        rest = others;
        images.picture(mine, *shape)
    };
    sample.image_shapes.iter().map(picture).collect()
}

//! Which changes an image gets, as LeRobot's `RandomSubsetApply` and torchvision's transforms draw them: so
//! many transforms without repetition, by their weights, then the parameters of each.
//!
//! Everything is a function of (seed, epoch, sample, camera). So a retry, another micro-batch, another world
//! size and a resume see the same picture, and every epoch another one.

use coxswain_models::pretrained::pictures::Rgb;
use coxswain_nn::rng::{Draws, Key, Purpose};

use super::{
    change::Change,
    geometry::{Motion, Part},
    picture::Picture,
};
use crate::vla_flow::config::{
    Affine, Augmentation, Crop, ResizedCrop, Transform, Transforms, WeightedTransform,
};

/// Tries before torchvision takes the largest part of a legal aspect in the middle.
const CROP_TRIES: usize = 10;

/// What an image is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::vla_flow::data) struct View {
    pub(in crate::vla_flow::data) epoch: u64,
    pub(in crate::vla_flow::data) sample: u64,
    /// The camera's place in `data.cameras`.
    pub(in crate::vla_flow::data) camera: u32,
}

/// Changes images of a run.
pub(in crate::vla_flow::data) struct Augmenter {
    seed: u64,
    /// All have a weight above 0.
    transforms: Vec<WeightedTransform>,
    count: usize,
    random_order: bool,
}

impl Augmenter {
    /// None where images stay as they are.
    pub(in crate::vla_flow::data) fn from_settings(settings: &Augmentation, seed: u64) -> Option<Self> {
        let settings = settings.transforms()?;
        let Transforms { max_num_transforms, random_order, .. } = settings;
        let transforms: Vec<_> = settings.weighted().into_iter().filter(|t| t.weight > 0.0).collect();
        let count = max_num_transforms.min(transforms.len());
        Some(Self { seed, transforms, count, random_order })
    }

    /// The image that training sees.
    pub(in crate::vla_flow::data) fn apply(&self, view: View, image: &Rgb) -> Rgb {
        let mut picture = Picture::from_image(image);
        for change in self.draw(view, image.height, image.width) {
            change.apply(&mut picture);
        }
        picture.into_rgb()
    }

    /// The changes of a view of `height x width` pixels, in the order in which they are applied.
    pub(super) fn draw(&self, view: View, height: usize, width: usize) -> Vec<Change> {
        let View { epoch: step, sample, camera: repeat } = view;
        let mut draws = Key { seed: self.seed, purpose: Purpose::Task, step, sample, repeat }.draws();
        let mut left: Vec<usize> = (0..self.transforms.len()).collect();
        let mut chosen: Vec<usize> =
            (0..self.count).map(|_| left.remove(self.choose(&left, &mut draws))).collect();
        if !self.random_order {
            chosen.sort_unstable();
        }
        let drawn = |at: usize| change(self.transforms[at].transform, [height, width], &mut draws);
        chosen.into_iter().map(drawn).collect()
    }

    /// A place in `left`, by weight.
    fn choose(&self, left: &[usize], draws: &mut Draws) -> usize {
        let weight = |at: &usize| self.transforms[*at].weight;
        let mut place = f64::from(draws.uniform()) * left.iter().map(weight).sum::<f64>();
        let found = left.iter().position(|at| {
            place -= weight(at);
            place < 0.0
        });
        // The sum may have been rounded up.
        found.unwrap_or(left.len() - 1)
    }
}

fn change(transform: Transform, size: [usize; 2], draws: &mut Draws) -> Change {
    match transform {
        Transform::Brightness(range) => Change::Brightness(within(range, draws)),
        Transform::Contrast(range) => Change::Contrast(within(range, draws)),
        Transform::Saturation(range) => Change::Saturation(within(range, draws)),
        Transform::Hue(range) => Change::Hue(within(range, draws)),
        Transform::Sharpness(range) => Change::Sharpness(within(range, draws)),
        Transform::Affine(affine) => Change::Affine(motion(affine, size, draws)),
        Transform::Crop(Crop { fraction, .. }) => {
            let part = size.map(|side| ((side as f64 * fraction).round_ties_even() as usize).max(1));
            Change::Crop(anywhere(part, size, draws))
        }
        Transform::ResizedCrop(crop) => Change::Crop(part(crop, size, draws)),
    }
}

fn within([low, high]: [f64; 2], draws: &mut Draws) -> f64 {
    low + (high - low) * f64::from(draws.uniform())
}

fn motion(affine: Affine, [height, width]: [usize; 2], draws: &mut Draws) -> Motion {
    let Affine { degrees, translate, scale, shear, .. } = affine;
    let angle = within(degrees, draws);
    let mut shift = |most: f64| within([-most, most], draws).round_ties_even() as i64;
    let shift = [shift(translate[0] * width as f64), shift(translate[1] * height as f64)];
    Motion { angle, shift, scale: within(scale, draws), shear: within(shear, draws) }
}

/// A part of this height and width at any place.
fn anywhere(part: [usize; 2], size: [usize; 2], draws: &mut Draws) -> Part {
    let mut place = |part: usize, side: usize| {
        let places = (side - part + 1) as f64;
        (f64::from(draws.uniform()) * places) as usize
    };
    let (top, left) = (place(part[0], size[0]), place(part[1], size[1]));
    Part { top, left, height: part[0], width: part[1] }
}

fn part(crop: ResizedCrop, size: [usize; 2], draws: &mut Draws) -> Part {
    let [height, width] = size.map(|side| side as f64);
    for _ in 0..CROP_TRIES {
        let area = height * width * within(crop.scale, draws);
        let aspect = within(crop.ratio.map(f64::ln), draws).exp();
        let part =
            [(area / aspect).sqrt(), (area * aspect).sqrt()].map(|side| side.round_ties_even() as usize);
        if part.iter().zip(size).all(|(part, side)| (1..=side).contains(part)) {
            return anywhere(part, size, draws);
        }
    }
    let [least, most] = crop.ratio;
    let whole = |side: f64| (side.round_ties_even() as usize).max(1);
    let [height, width] = match width / height {
        aspect if aspect < least => [whole(width / least).min(size[0]), size[1]],
        aspect if aspect > most => [size[0], whole(height * most).min(size[1])],
        _ => size,
    };
    Part { top: (size[0] - height) / 2, left: (size[1] - width) / 2, height, width }
}

//! Random changes of images in training: the key `data.augmentation`.
//!
//! Transforms and their parameters have the names and ranges of LeRobot's `ImageTransforms`, which are those
//! of torchvision's `ColorJitter`, `RandomAffine` and `RandomResizedCrop`.

use coxswain_proto::config::Findings;
use serde::{Deserialize, Serialize};

/// Where its keys stand.
const PATH: &str = "data.augmentation.transforms";

/// Whether images are changed, and how.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Augmentation {
    /// They are trained on as recorded.
    #[default]
    Off,
    /// What LeRobot does by default: up to three of brightness, contrast, saturation, hue, sharpness, affine.
    Lerobot,
    /// These.
    Transforms(Box<Transforms>),
}

/// Transforms to draw from; one that is not given is never drawn. They are applied in the order of these
/// fields.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Transforms {
    /// How many are drawn for an image, without repetition; all, if there are fewer.
    pub max_num_transforms: usize,
    /// Apply them in the order in which they were drawn.
    pub random_order: bool,
    /// Factor on all values.
    pub brightness: Option<Jitter>,
    /// Factor on the distance from the mean grey; 0 is that grey.
    pub contrast: Option<Jitter>,
    /// Factor on the distance from a pixel's own grey; 0 is grey.
    pub saturation: Option<Jitter>,
    /// Turns of the colour circle.
    pub hue: Option<Jitter>,
    /// Factor on the distance from the smoothed image; 0 is smoothed.
    pub sharpness: Option<Jitter>,
    /// Rotation, shift, scale and shear about the centre.
    pub affine: Option<Affine>,
    /// A part of the image at any place, at the size of the whole.
    pub crop: Option<Crop>,
    /// A part of any area and aspect at any place, at the size of the whole.
    pub resized_crop: Option<ResizedCrop>,
}

impl Default for Transforms {
    fn default() -> Self {
        Self {
            max_num_transforms: 3,
            random_order: false,
            brightness: None,
            contrast: None,
            saturation: None,
            hue: None,
            sharpness: None,
            affine: None,
            crop: None,
            resized_crop: None,
        }
    }
}

/// One factor, drawn uniformly.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Jitter {
    /// How often it is drawn beside the others.
    pub weight: f64,
    /// Least and largest; LeRobot's own if absent.
    pub range: Option<[f64; 2]>,
}

impl Default for Jitter {
    fn default() -> Self {
        Self { weight: 1.0, range: None }
    }
}

/// Every parameter is drawn uniformly; pixels are those nearest, what comes from outside is black.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Affine {
    /// How often it is drawn beside the others.
    pub weight: f64,
    /// Least and largest angle, in degrees.
    pub degrees: [f64; 2],
    /// Largest shift, as fractions of width and height; whole pixels are drawn.
    pub translate: [f64; 2],
    /// Least and largest scale.
    pub scale: [f64; 2],
    /// Least and largest shear along rows, in degrees.
    pub shear: [f64; 2],
}

impl Default for Affine {
    fn default() -> Self {
        let (degrees, translate) = ([-5.0, 5.0], [0.05, 0.05]);
        Self { weight: 1.0, degrees, translate, scale: [1.0, 1.0], shear: [0.0, 0.0] }
    }
}

/// A part of each side.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Crop {
    /// How often it is drawn beside the others.
    pub weight: f64,
    /// The crop's size as a part of height and of width.
    pub fraction: f64,
}

impl Default for Crop {
    fn default() -> Self {
        Self { weight: 1.0, fraction: 0.95 }
    }
}

/// A part of the area.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ResizedCrop {
    /// How often it is drawn beside the others.
    pub weight: f64,
    /// Least and largest area, as fractions of the image's.
    pub scale: [f64; 2],
    /// Least and largest width over height, drawn uniformly in the logarithm.
    pub ratio: [f64; 2],
}

impl Default for ResizedCrop {
    fn default() -> Self {
        Self { weight: 1.0, scale: [0.8, 1.0], ratio: [3.0 / 4.0, 4.0 / 3.0] }
    }
}

/// A transform with everything it is drawn by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Transform {
    /// See [`Transforms::brightness`].
    Brightness([f64; 2]),
    /// See [`Transforms::contrast`].
    Contrast([f64; 2]),
    /// See [`Transforms::saturation`].
    Saturation([f64; 2]),
    /// See [`Transforms::hue`].
    Hue([f64; 2]),
    /// See [`Transforms::sharpness`].
    Sharpness([f64; 2]),
    /// See [`Transforms::affine`].
    Affine(Affine),
    /// See [`Transforms::crop`].
    Crop(Crop),
    /// See [`Transforms::resized_crop`].
    ResizedCrop(ResizedCrop),
}

/// A transform, and how often it is drawn beside the others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightedTransform {
    /// How often.
    pub weight: f64,
    /// What.
    pub transform: Transform,
}

impl Augmentation {
    /// The transforms to draw from; none where images stay as they are.
    pub fn transforms(&self) -> Option<Transforms> {
        match self {
            Self::Off => None,
            Self::Lerobot => Some(Transforms::lerobot()),
            Self::Transforms(transforms) => Some((**transforms).clone()),
        }
    }

    pub(super) fn check(&self, f: &mut Findings) {
        if let Self::Transforms(transforms) = self {
            transforms.check(f);
        }
    }
}

impl Transforms {
    /// LeRobot's default.
    fn lerobot() -> Self {
        let jitter = Some(Jitter::default());
        Self {
            brightness: jitter,
            contrast: jitter,
            saturation: jitter,
            hue: jitter,
            sharpness: jitter,
            affine: Some(Affine::default()),
            ..Self::default()
        }
    }

    /// The transforms that are given, in the order in which they are applied.
    pub fn weighted(&self) -> Vec<WeightedTransform> {
        self.named().into_iter().map(|(_, weighted)| weighted).collect()
    }

    fn named(&self) -> Vec<(&'static str, WeightedTransform)> {
        type TransformMaker = fn([f64; 2]) -> Transform;
        let jitters: [(_, _, TransformMaker, _); 5] = [
            ("brightness", self.brightness, Transform::Brightness, [0.8, 1.2]),
            ("contrast", self.contrast, Transform::Contrast, [0.8, 1.2]),
            ("saturation", self.saturation, Transform::Saturation, [0.5, 1.5]),
            ("hue", self.hue, Transform::Hue, [-0.05, 0.05]),
            ("sharpness", self.sharpness, Transform::Sharpness, [0.5, 1.5]),
        ];
        let jitters = jitters.into_iter().filter_map(|(name, jitter, made, own)| {
            let Jitter { weight, range } = jitter?;
            Some((name, WeightedTransform { weight, transform: made(range.unwrap_or(own)) }))
        });
        let others = [
            self.affine
                .map(|a| ("affine", WeightedTransform { weight: a.weight, transform: Transform::Affine(a) })),
            self.crop
                .map(|c| ("crop", WeightedTransform { weight: c.weight, transform: Transform::Crop(c) })),
            self.resized_crop.map(|c| {
                ("resized_crop", WeightedTransform { weight: c.weight, transform: Transform::ResizedCrop(c) })
            }),
        ];
        jitters.chain(others.into_iter().flatten()).collect()
    }

    fn check(&self, f: &mut Findings) {
        f.at_least_one(&format!("{PATH}.max_num_transforms"), self.max_num_transforms);
        let named = self.named();
        f.require(
            named.iter().any(|(_, weighted)| weighted.weight > 0.0),
            PATH,
            "names no transform that could be drawn",
            "name one with a weight above 0, for instance `brightness: {}`, or use `data.augmentation: lerobot` or `off`",
        );
        for (name, WeightedTransform { weight, transform }) in named {
            let path = |field: &str| format!("{PATH}.{name}.{field}");
            f.in_range(&path("weight"), weight, weight >= 0.0, "of at least 0");
            let mut range = |field: &str, [low, high]: [f64; 2], least: f64, most: f64, bounds: &str| {
                f.require(
                    low.is_finite() && high.is_finite() && least <= low && low <= high && high <= most,
                    &path(field),
                    format_args!("must be two numbers {bounds}, the smaller first; is [{low:?}, {high:?}]"),
                    "write `[SMALLER, LARGER]`, both in that range",
                );
            };
            let (tiny, huge) = (f64::MIN_POSITIVE, f64::MAX);
            match transform {
                Transform::Hue(given) => range("range", given, -0.5, 0.5, "from -0.5 to 0.5"),
                Transform::Brightness(given)
                | Transform::Contrast(given)
                | Transform::Saturation(given)
                | Transform::Sharpness(given) => range("range", given, 0.0, huge, "of at least 0"),
                Transform::Affine(Affine { degrees, translate, scale, shear, .. }) => {
                    range("degrees", degrees, -360.0, 360.0, "from -360 to 360");
                    range("scale", scale, tiny, huge, "above 0");
                    range("shear", shear, -89.0, 89.0, "from -89 to 89");
                    for part in translate {
                        f.in_range(&path("translate"), part, (0.0..=1.0).contains(&part), "from 0 to 1");
                    }
                }
                Transform::Crop(Crop { fraction, .. }) => {
                    let is_part = (tiny..=1.0).contains(&fraction);
                    f.in_range(&path("fraction"), fraction, is_part, "above 0 and at most 1");
                }
                Transform::ResizedCrop(ResizedCrop { scale, ratio, .. }) => {
                    range("scale", scale, tiny, 1.0, "above 0 and at most 1");
                    range("ratio", ratio, tiny, huge, "above 0");
                }
            }
        }
    }
}

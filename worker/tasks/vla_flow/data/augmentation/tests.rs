//! Changes against torchvision (fixtures made by `integration-tests/fixtures/make_augmentation.py`), and what
//! is drawn.

use std::{collections::BTreeMap, path::Path};

use coxswain_models::pretrained::pictures::Rgb;
use proptest::prelude::*;
use safetensors::SafeTensors;

use super::{
    change::Change,
    draw::{Augmenter, View},
    geometry::{Motion, Part},
    picture::Picture,
};
use crate::vla_flow::config::{Augmentation, Crop, Jitter, ResizedCrop, Transforms};

fn parsed(change: &str, given: &[f64]) -> Change {
    match (change, given) {
        ("brightness", [factor]) => Change::Brightness(*factor),
        ("contrast", [factor]) => Change::Contrast(*factor),
        ("saturation", [factor]) => Change::Saturation(*factor),
        ("hue", [factor]) => Change::Hue(*factor),
        ("sharpness", [factor]) => Change::Sharpness(*factor),
        ("affine", &[angle, right, down, scale, shear]) => {
            Change::Affine(Motion { angle, shift: [right as i64, down as i64], scale, shear })
        }
        ("crop", given) => {
            let [top, left, height, width] = given.iter().map(|v| *v as usize).collect::<Vec<_>>()[..] else {
                panic!("a part has four numbers")
            };
            Change::Crop(Part { top, left, height, width })
        }
        _ => panic!("{change} {given:?} is no change"),
    }
}

#[test]
fn every_change_is_torchvisions_own() {
    let path = "../../integration-tests/fixtures/data/augmentation.safetensors";
    let bytes = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut cases = 0;
    for name in file.names() {
        let Some((picture, rest)) = name.split_once('/') else { continue };
        let (change, given) = rest.split_once('/').expect("its parameters");
        let given: Vec<f64> = given.split(' ').map(|value| value.parse().unwrap()).collect();
        let image = file.tensor(&format!("{picture}.bytes")).unwrap();
        let (height, width) = (image.shape()[0], image.shape()[1]);
        let mut got = Picture::from_image(&Rgb { height, width, pixels: image.data().to_vec() });
        parsed(change, &given).apply(&mut got);
        let want: &[[f32; 3]] = &file
            .tensor(name)
            .unwrap()
            .data()
            .chunks_exact(12)
            .map(bytemuck::pod_read_unaligned)
            .collect::<Vec<_>>();
        assert_eq!(got.pixels.len(), want.len(), "{name}");
        // A grey level is 4e-3: what may differ is the order of additions. A hue is near the ends of its
        // circle in the last bits of 1.
        let off = got.pixels.iter().flatten().zip(want.iter().flatten()).map(|(a, b)| (a - b).abs());
        let off = off.fold(0.0, f32::max);
        assert!(off <= 1.5e-6, "{name}: off by {off:e}");
        cases += 1;
    }
    assert_eq!(cases, 76, "cases of the fixture");
}

fn jitter(weight: f64) -> Option<Jitter> {
    Some(Jitter { weight, range: None })
}

fn augmenter(transforms: Transforms) -> Augmenter {
    Augmenter::from_settings(&Augmentation::Transforms(Box::new(transforms)), 7)
        .expect("it changes something")
}

fn view(sample: u64) -> View {
    View { epoch: 2, sample, camera: 1 }
}

#[test]
fn nothing_is_drawn_where_images_stay_as_they_are() {
    assert!(Augmenter::from_settings(&Augmentation::Off, 7).is_none());
}

#[test]
fn what_is_drawn_depends_on_seed_epoch_sample_and_camera_alone() {
    let changed = |seed, view| {
        Augmenter::from_settings(&Augmentation::Lerobot, seed)
            .expect("it changes something")
            .draw(view, 30, 40)
    };
    let here = changed(7, view(5));
    // In the midst of others, and once more.
    changed(7, view(4));
    assert_eq!(changed(7, view(5)), here);
    assert_ne!(changed(8, view(5)), here);
    assert_ne!(changed(7, view(6)), here);
    assert_ne!(changed(7, View { epoch: 3, ..view(5) }), here);
    assert_ne!(changed(7, View { camera: 0, ..view(5) }), here);
}

#[test]
fn transforms_are_drawn_as_often_as_their_weights_say() {
    let transforms = Transforms {
        max_num_transforms: 1,
        brightness: jitter(3.0),
        hue: jitter(1.0),
        sharpness: jitter(0.0),
        ..Transforms::default()
    };
    let augmenter = augmenter(transforms);
    let drawn = (0..4000).map(|sample| augmenter.draw(view(sample), 9, 9));
    let bright = drawn.filter(|changes| matches!(changes[..], [Change::Brightness(_)])).count();
    // Four deviations of a binomial distribution of 4000 with 3/4.
    assert!((bright as f64 - 3000.0).abs() < 4.0 * (4000.0 * 0.75 * 0.25f64).sqrt(), "{bright} of 4000");
}

#[test]
fn a_crop_of_an_aspect_that_does_not_fit_is_the_largest_in_the_middle() {
    let wide = ResizedCrop { scale: [1.0, 1.0], ratio: [0.5, 0.5], ..ResizedCrop::default() };
    let augmenter = augmenter(Transforms { resized_crop: Some(wide), ..Transforms::default() });
    let part = Part { top: 0, left: 15, height: 20, width: 10 };
    assert_eq!(augmenter.draw(view(0), 20, 40), [Change::Crop(part)]);
}

fn kind(change: Change) -> u8 {
    match change {
        Change::Brightness(_) => 0,
        Change::Contrast(_) => 1,
        Change::Saturation(_) => 2,
        Change::Hue(_) => 3,
        Change::Sharpness(_) => 4,
        Change::Affine(_) => 5,
        Change::Crop(_) => 6,
    }
}

proptest! {
    #[test]
    fn as_many_are_drawn_as_asked_for_without_repetition_and_in_order(
        sample: u64, count in 1usize..9, random_order: bool, side in (1usize..40, 1usize..40),
    ) {
        let all = Transforms {
            max_num_transforms: count,
            random_order,
            brightness: jitter(1.0),
            contrast: jitter(1.0),
            hue: jitter(2.0),
            crop: Some(Crop::default()),
            ..Transforms::default()
        };
        let kinds: Vec<u8> =
            augmenter(all).draw(view(sample), side.0, side.1).into_iter().map(kind).collect();
        prop_assert_eq!(kinds.len(), count.min(4));
        let mut sorted = kinds.clone();
        sorted.sort_unstable();
        prop_assert!(random_order || sorted == kinds);
        sorted.dedup();
        prop_assert_eq!(sorted.len(), count.min(4));
    }

    #[test]
    fn parameters_are_within_their_ranges_and_parts_within_the_image(
        sample: u64, height in 1usize..60, width in 1usize..60,
    ) {
        let all = Transforms {
            max_num_transforms: 9,
            crop: Some(Crop { fraction: 0.7, ..Crop::default() }),
            resized_crop: Some(ResizedCrop { scale: [0.1, 1.0], ..ResizedCrop::default() }),
            ..Augmentation::Lerobot.transforms().expect("LeRobot's")
        };
        let augmenter = augmenter(all);
        let changes = augmenter.draw(view(sample), height, width);
        prop_assert_eq!(changes.len(), 8);
        for change in &changes {
            prop_assert!(match *change {
                Change::Brightness(f) | Change::Contrast(f) => (0.8..=1.2).contains(&f),
                Change::Saturation(f) | Change::Sharpness(f) => (0.5..=1.5).contains(&f),
                Change::Hue(factor) => (-0.05..=0.05).contains(&factor),
                Change::Affine(Motion { angle, shift: [right, down], scale, shear }) => {
                    (-5.0..=5.0).contains(&angle)
                        && right.unsigned_abs() as f64 <= (0.05 * width as f64).round()
                        && down.unsigned_abs() as f64 <= (0.05 * height as f64).round()
                        && (scale, shear) == (1.0, 0.0)
                }
                Change::Crop(Part { top, left, height: part_h, width: part_w }) => {
                    part_h * part_w > 0 && top + part_h <= height && left + part_w <= width
                }
            }, "{change:?}");
        }
        let pixels = (0..3 * height * width).map(|at| (at * 37 % 256) as u8).collect();
        let image = Rgb { height, width, pixels };
        let seen = augmenter.apply(view(sample), &image);
        prop_assert_eq!((seen.height, seen.width, seen.pixels.len()), (height, width, 3 * height * width));
    }
}

#[test]
fn a_flat_grey_image_keeps_its_grey_under_every_change_that_keeps_its_values() {
    let image = Rgb { height: 9, width: 7, pixels: vec![200; 9 * 7 * 3] };
    let mut kept = BTreeMap::new();
    for change in [
        Change::Contrast(1.7),
        Change::Saturation(0.1),
        Change::Hue(0.4),
        Change::Sharpness(2.0),
        Change::Crop(Part { top: 2, left: 1, height: 3, width: 5 }),
    ] {
        let mut picture = Picture::from_image(&image);
        change.apply(&mut picture);
        kept.insert(kind(change), picture.into_rgb() == image);
    }
    assert!(kept.values().all(|kept| *kept), "{kept:?}");
}

//! Augmentation in the data path: what it changes, and what it leaves.

use coxswain_models::families::shelf;
use coxswain_task::Samples;

use super::{mini, spec};
use crate::vla_flow::{
    config::{Augmentation, VlaSpec},
    data::{Dataset, Sample},
};

#[test]
fn images_change_in_training_alone_and_nothing_else_changes() {
    let plain = Dataset::from_spec(&spec(&mini()), shelf()).unwrap();
    let mut augmented = spec(&mini());
    augmented.vla_mut().data.augmentation = Augmentation::Lerobot;
    let augmented = Dataset::from_spec(&augmented, shelf()).unwrap();
    for index in [0, 7, 31] {
        let recorded = plain.sample(index).unwrap();
        let seen = augmented.sample_in_epoch(index, 4).unwrap();
        assert_eq!(augmented.sample(index).unwrap(), recorded);
        // What evaluation, probes and the table of features read.
        assert_eq!(augmented.read(index).unwrap().content::<Sample>(), &recorded);
        assert_eq!(plain.sample_in_epoch(index, 4).unwrap(), recorded);
        assert_ne!(seen.pixel_values, recorded.pixel_values);
        assert_eq!(Sample { pixel_values: recorded.pixel_values.clone(), ..seen.clone() }, recorded);
        assert_eq!(augmented.sample_in_epoch(index, 4).unwrap(), seen);
        assert_ne!(augmented.sample_in_epoch(index, 5).unwrap().pixel_values, seen.pixel_values);
    }
}

//! What `cox data preview` shows is what the model gets.

use coxswain_models::families::shelf;
use coxswain_models::pretrained::pictures::Rgb;

use super::{mini, spec};
use crate::vla_flow::data::Dataset;

#[test]
fn pictures_and_numbers_are_those_of_samples() {
    let mut spec = spec(&mini());
    spec.data.holdout_episodes = vec![3];
    let dataset = Dataset::from_spec(&spec, shelf()).unwrap();
    let preview = dataset.preview(3, 4).unwrap();
    let samples = dataset.episode_samples(3).unwrap();
    assert!(preview.title.starts_with("episode 3, held out: "), "{}", preview.title);
    assert_eq!(preview.frames.last(), Some(&(samples.end - samples.start - 1)));
    let [strip] = &preview.strips[..] else { panic!("one camera") };
    for (picture, frame) in strip.pictures.iter().zip(&preview.frames) {
        let sample = dataset.sample(samples.start + frame).unwrap();
        // Resized as it is: cut again it gives the same patches, bit for bit.
        let image = Rgb { height: picture.height, width: picture.width, pixels: picture.rgb.clone() };
        let again = dataset.images.process(image).unwrap();
        assert_eq!((again.shape, again.pixel_values), (sample.image_shapes[0], sample.pixel_values.to_vec()));
    }
    let [state, action] = &preview.plots[..] else { panic!("state and action") };
    for (frame, index) in samples.enumerate() {
        let sample = dataset.sample_unseen(index).unwrap();
        assert_eq!(state.series.iter().map(|of| of[frame]).collect::<Vec<_>>(), sample.state);
        assert_eq!(action.series[0][frame], sample.actions[0]);
    }
    let missing = dataset.preview(4, 4).unwrap_err().to_string();
    assert_eq!(missing, "episode 4 does not exist (4 in all, numbered from 0)");
}

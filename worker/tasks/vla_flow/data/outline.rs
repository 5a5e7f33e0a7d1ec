//! How large a run's samples are, from metadata alone: what a memory prediction needs to know of the data.
//!
//! Opening a [`Dataset`](super::Dataset) reads the tokenizer, which for a real checkpoint takes half a second
//! and tens of megabytes. This reads the metadata and the image processor's bounds; the tokenizer only when
//! it is small. Sizes are those of the *longest* sample, not of the mean one: the largest micro-batch is what
//! has to fit.

use std::path::Path;

use coxswain_proto::run_spec::RunSpec;

use coxswain_data::{
    DataError,
    lerobot::{Catalog, feature::Feature, frames::FrameStore, info::Info},
};
use coxswain_models::{Shelf, pretrained::pictures::ImageShape};
use coxswain_nn::kernels::sizes::Sizes;

use super::batch::SampleDims;
use super::mixture;
use super::numeric::Numeric;
use super::selection::Selection;
use super::sizes::{camera_size, prompt_form, sensor_shape};
use crate::{
    settings::checked,
    tokens::outline::{SMALL_TOKENIZER, estimated},
    vla_flow::{
        base::{InputMakers, tokenizer},
        config::{HeadKind, VlaSettings},
        oft::estimated_tokens,
    },
};

/// Tokens of the prompt's frame: system turn, user turn, generation prompt (`prompt`).
const FRAME_TOKENS: usize = 19;
/// Tokens around one image.
const IMAGE_TOKENS: usize = 2;

/// How the longest prompt's length is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptLength {
    /// Encoded by the checkpoint's tokenizer.
    Encoded,
    /// Estimated from the text's length.
    Estimated,
}

/// Sizes of a run's samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outline {
    /// Sizes that all samples share.
    pub dims: SampleDims,
    /// Shapes of one sample's images, in prompt order.
    pub images: Vec<ImageShape>,
    /// Patches of one sample's images.
    pub patches: u64,
    /// Tokens of the longest prompt, images included.
    pub prompt_tokens: usize,
    /// How that is known.
    pub prompt_length: PromptLength,
    /// Frames of the data set.
    pub frames: u64,
    /// Frames that an epoch trains on; none of several data sets, whose shares decide.
    pub epoch: Option<u64>,
    /// Bytes of all data files.
    pub data_bytes: u64,
    /// Bytes that reading the cameras that are stored as video takes at most: decoders, and where frames lie.
    pub video_bytes: u64,
    /// Bytes of the tokenizer's file; 0 if there is none.
    pub tokenizer_bytes: u64,
}

impl Outline {
    /// Reads the metadata of the run's data sets, and of its checkpoint what images and prompts depend on.
    pub fn from_spec(spec: &RunSpec, models: Shelf<Sizes>) -> Result<Self, DataError> {
        let vla = checked(VlaSettings::from_spec(spec))?;
        let outline = |(at, set)| {
            Self::of_one(&vla.spec_of_set(spec, set), models)
                .map_err(|source| mixture::of_set(at, set, source))
        };
        let sets = vla.data.sets.iter().enumerate().map(outline);
        match sets.reduce(|one, other| Ok(one?.beside(other?))) {
            Some(of_all) => of_all,
            None => Self::of_one(spec, models),
        }
    }

    /// The outline of two data sets: the longest sample of either, and the files of both.
    fn beside(self, other: Self) -> Self {
        let (more, fewer) = if self.patches >= other.patches { (self, other) } else { (other, self) };
        Self {
            dims: more.dims.widest(fewer.dims),
            prompt_tokens: more.prompt_tokens.max(fewer.prompt_tokens),
            frames: more.frames + fewer.frames,
            epoch: None,
            data_bytes: more.data_bytes + fewer.data_bytes,
            video_bytes: more.video_bytes + fewer.video_bytes,
            ..more
        }
    }

    /// Outline of a run on one data set.
    fn of_one(spec: &RunSpec, models: Shelf<Sizes>) -> Result<Self, DataError> {
        let vla = checked(VlaSettings::from_spec(spec))?;
        let data = &vla.data;
        let catalog = Catalog::open(Path::new(&spec.data.path))?;
        let info = &catalog.info;
        let (sensor_window, sensor_channels) = sensor_shape(info, data.sensor.as_ref())?;
        let frames_seen = vla.observation.frames();
        let dims = SampleDims {
            state: frames_seen * Numeric::width(info, "state", data.state.names())?,
            sensor_window,
            sensor_channels,
            horizon: data.horizon,
            action: Numeric::width(info, "action", data.action.names())?,
        };
        let makers = InputMakers::from_settings(&vla, models)?;
        let processor = makers.images(&vla)?;
        let shape = |name: &String| {
            let (height, width) = camera_size(info, name)?;
            processor.shape(height, width).map_err(|fault| {
                DataError::invalid(
                    &info.path,
                    format!("features.{name}"),
                    fault,
                    "use a camera of another shape",
                )
            })
        };
        let images =
            data.cameras.iter().map(shape).collect::<Result<Vec<_>, DataError>>()?.repeat(frames_seen);
        let patches = processor.patches();
        let tokenizer_bytes =
            tokenizer(&vla).ok().and_then(|path| std::fs::metadata(path).ok()).map_or(0, |file| file.len());
        let texts: Vec<&str> = catalog.tasks.values().map(String::as_str).collect();
        let (prompt_tokens, prompt_length) = match tokenizer_bytes {
            1..=SMALL_TOKENIZER => {
                let encoder = makers.prompts(&prompt_form(&vla))?;
                // Values as far out as they get, which take the most to tell.
                let state = vec![f32::MAX; dims.state];
                let told = |text: &&str| encoder.encode_observed(text, &state, &images);
                let tokens = |text: &&str| told(text).map_or(0, |ids| ids.len());
                (texts.iter().map(tokens).max().unwrap_or(0), PromptLength::Encoded)
            }
            _ => {
                let seen: usize = images.iter().map(|shape| patches.tokens(*shape) + IMAGE_TOKENS).sum();
                let text = |text: &&str| data.prompt.replace("{task}", text).len();
                let longest = texts.iter().map(text).max().unwrap_or(0);
                let text = estimated(longest);
                let kept = vla.observation.max_text_tokens.map_or(text, |most| text.min(most));
                let actions = match vla.expert.head {
                    HeadKind::Oft => estimated_tokens(data.horizon),
                    HeadKind::Flow | HeadKind::Layerwise => 0,
                };
                let tokens = FRAME_TOKENS + seen + kept + actions + makers.told_tokens(dims.state);
                (tokens, PromptLength::Estimated)
            }
        };
        let (frames, data_bytes, video_bytes) =
            (info.frames, catalog.data_bytes, video_bytes(info, &data.cameras)?);
        let selection = Selection::from_catalog(&catalog, data, &spec.data.holdout_episodes).ok();
        Ok(Self {
            dims,
            patches: images.iter().map(|shape| patches.count(*shape) as u64).sum(),
            images,
            prompt_tokens,
            prompt_length,
            frames,
            epoch: selection.map(|selection| selection.training(&catalog).len()),
            data_bytes,
            video_bytes,
            tokenizer_bytes,
        })
    }
}

fn video_bytes(info: &Info, cameras: &[String]) -> Result<u64, DataError> {
    let videos = cameras.iter().filter(|name| info.feature(name).is_some_and(Feature::is_video));
    let sizes = videos.map(|name| camera_size(info, name)).collect::<Result<Vec<_>, _>>()?;
    Ok(FrameStore::bytes(&sizes, info.frames))
}

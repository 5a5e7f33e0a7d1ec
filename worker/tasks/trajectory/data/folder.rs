//! Images as a run sees them: which there are, in which order, and each as patches.
//!
//! [`ImageFolder::from_spec`] reads every file once to name it by its content: that keys the
//! order of samples and the features that are kept. What only shows when an image is decoded is that image's
//! own fault: the run goes on without it.

use std::{path::Path, sync::Arc};

use coxswain_data::{DataError, Fingerprint, TrainingSamples, shards::Shards, surviving::surviving};
use coxswain_feature_store::{Digest, SampleKey, Store, StoreError};
use coxswain_models::{
    Shelf,
    pretrained::{
        directory,
        pictures::{ImageProcessor, ImageShape, PatchShape, PixelBounds, decode},
    },
};
use coxswain_nn::kernels::sizes::Sizes;
use coxswain_nn::pulse;
use coxswain_proto::{ids::Step, order::DamagedRow, run_spec::RunSpec};
use coxswain_task::{Batch, InputIngredients, Inputs, Sample, SampleKeys, Samples};

use super::{
    batch::{ImageBatch, ImageSample},
    listing::{ImagePlace, Listing, list},
};
use crate::{
    holdout::Holdout,
    settings::{checked, unread},
    trajectory::config::TrajectorySettings,
};

/// Red, green and blue.
const CHANNELS: usize = 3;

/// The grid of patches of every image, `(t, h, w)`: fits the tower, and has a patch for each position.
pub fn grid_of(shape: PatchShape, settings: &TrajectorySettings) -> Result<ImageShape, DataError> {
    let (side, positions) = (settings.data.image_size, settings.extractor.spatial_resolution);
    let path = Path::new(&settings.extractor.path).join("config.json");
    let cell = shape.patch * shape.merge;
    let patches = (side / shape.patch) as u32;
    if !side.is_multiple_of(cell) {
        let found = format!("{side} pixels is not a multiple of the vision tower's cell of {cell} pixels");
        let remedy = format!("give a multiple, for instance {}", side.div_ceil(cell) * cell);
        return Err(DataError::invalid(&path, "data.image_size", found, remedy));
    }
    if positions > patches as usize {
        let found = format!("{positions} positions per side, but an image has {patches} patches per side");
        let least = (positions * shape.patch).div_ceil(cell) * cell;
        let remedy = format!("lower it, or raise data.image_size to at least {least}");
        return Err(DataError::invalid(&path, "extractor.spatial_resolution", found, remedy));
    }
    Ok([1, patches, patches])
}

/// One image.
struct Image {
    place: ImagePlace,
    digest: Digest,
}

/// Opened folders or shards. Shared between threads.
pub struct ImageFolder {
    images: Vec<Image>,
    shards: Option<Arc<Shards>>,
    domains: Vec<(String, u64)>,
    processor: Box<dyn ImageProcessor>,
    grid: ImageShape,
    positions: usize,
    settings: TrajectorySettings,
    holdout: Holdout,
    fingerprint: Fingerprint,
}

impl ImageFolder {
    /// Lists the run's images, and reads each once for its name.
    pub fn from_spec(spec: &RunSpec, models: Shelf<Sizes>) -> Result<Self, DataError> {
        let settings = checked(TrajectorySettings::from_spec(spec))?;
        let (path, model) = (Path::new(&spec.data.path), &directory::outline(&settings.extractor.path)?);
        let family = models.vision_language.of(model).map_err(unread)?;
        let grid = grid_of(family.patches(model)?, &settings)?;
        let Listing { places, domains, shards } = list(path, &settings.data)?;
        let (mut images, mut all) = (Vec::with_capacity(places.len()), blake3::Hasher::new());
        for place in places {
            pulse::beat();
            let digest = Digest::of_image(&place.read_bytes()?);
            all.update(&digest.0);
            images.push(Image { place, digest });
        }
        let holdout = Holdout::new(
            path,
            "image",
            "name a folder with images",
            images.len() as u64,
            settings.data.holdout_every,
        )?;
        Ok(Self {
            images,
            shards,
            domains,
            processor: family.images(model, PixelBounds::default())?,
            grid,
            positions: settings.extractor.spatial_resolution.pow(2),
            settings,
            holdout,
            fingerprint: Fingerprint(*all.finalize().as_bytes()),
        })
    }

    /// Image `index`, as training sees it.
    pub fn sample(&self, index: u64) -> Result<ImageSample, DataError> {
        let image = self.image(index)?;
        let refuse = |fault: String| image.place.fault(fault);
        let bytes = image.place.read_bytes()?;
        if Digest::of_image(&bytes) != image.digest {
            return Err(refuse("is not the same image as when the run began".into()));
        }
        let input =
            surviving(|| Ok(self.processor.process_to(decode(&bytes).map_err(refuse)?, self.grid)), refuse)?;
        Ok(ImageSample { index, pixel_values: Arc::new(input.pixel_values) })
    }

    /// Patches of every image, `(t, h, w)`.
    pub fn grid(&self) -> ImageShape {
        self.grid
    }

    fn image(&self, index: u64) -> Result<&Image, DataError> {
        let len = self.images.len() as u64;
        let image = usize::try_from(index).ok().and_then(|index| self.images.get(index));
        image.ok_or(DataError::OutOfRange { what: "sample", index, len })
    }
}

/// Whether there are no more values than an image of one colour has: one of each channel.
fn is_plain(pixel_values: &[f32]) -> bool {
    let mut seen: Vec<f32> = Vec::new();
    for value in pixel_values {
        if !seen.contains(value) {
            seen.push(*value);
        }
        if seen.len() > CHANNELS {
            return false;
        }
    }
    true
}

impl Samples for ImageFolder {
    fn training(&self) -> &Arc<TrainingSamples> {
        self.holdout.training()
    }

    fn holdout(&self) -> Vec<u64> {
        self.holdout.held_out()
    }

    fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    fn read(&self, index: u64) -> Result<Box<dyn Sample>, DataError> {
        Ok(Box::new(self.sample(index)?))
    }

    fn doubts(&self, sample: &dyn Sample) -> Vec<(&'static str, DataError)> {
        let sample: &ImageSample = sample.content();
        let Ok(image) = self.image(sample.index) else { return Vec::new() };
        let mut doubts = Vec::new();
        if is_plain(&sample.pixel_values) {
            doubts.push(("plain", image.place.fault("the whole image is one colour".into())));
        }
        // Each but the first of those that are alike.
        let first = self.images.iter().position(|other| other.digest == image.digest);
        if let Some(first) = first.filter(|first| (*first as u64) < sample.index) {
            let first = self.images[first].place.name();
            doubts.push(("twice", image.place.fault(format!("the same image as {first}"))));
        }
        doubts
    }

    fn read_beside(&self, index: u64, _inputs: Inputs) -> Result<Option<Box<dyn Sample>>, DataError> {
        Ok(Some(Box::new(ImageSample { index, pixel_values: Arc::default() })))
    }

    fn collate(&self, step: Step, samples: &[&dyn Sample]) -> Box<dyn Batch> {
        let samples: Vec<&ImageSample> = samples.iter().map(|sample| sample.content()).collect();
        Box::new(ImageBatch::from_samples(step, self.positions, &samples))
    }

    fn take_apart(&self, batch: &dyn Batch) -> Vec<Box<dyn Sample>> {
        batch.content::<ImageBatch>().apart().map(|image| Box::new(image) as Box<dyn Sample>).collect()
    }

    fn damaged_row(&self, index: u64, _fault: &DataError) -> DamagedRow {
        self.holdout.damaged(index)
    }

    fn keys(&self, _store: &Store) -> Result<SampleKeys, StoreError> {
        let keys = self.images.iter().map(|image| Some(SampleKey::new(&[image.digest], "")));
        Ok(SampleKeys::new(keys.collect(), self.images.len() as u64))
    }

    fn ingredients(&self) -> Result<InputIngredients, StoreError> {
        let side = self.settings.data.image_size;
        let preprocessing = format!("{}; resized to {side} x {side}", self.processor.describe());
        // No text is read.
        Ok(InputIngredients { preprocessing, prompt: String::new(), tokenizer: Digest([0; 32]) })
    }

    fn describe(&self) -> Result<Vec<(&'static str, String)>, DataError> {
        let held_out = self.holdout.describe();
        let mut of = String::new();
        for (name, used) in self.domains.iter().filter(|(name, _)| !name.is_empty()) {
            of += &format!("{}{name} {used}", if of.is_empty() { " (" } else { ", " });
        }
        of += if of.is_empty() { "" } else { ")" };
        let side = self.settings.data.image_size;
        of += &self.shards.as_ref().map_or_else(String::new, |shards| format!(" {}", shards.describe()));
        let images = format!("{} images{of} as {side} x {side} pixels, {held_out}", self.images.len());
        Ok(vec![("images", images)])
    }

    fn warnings(&self) -> Vec<String> {
        self.shards.as_deref().map_or_else(Vec::new, Shards::warnings)
    }
}

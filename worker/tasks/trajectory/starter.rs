//! A run file for images, from where they lie.

use std::path::{Path, PathBuf};

use coxswain_data::{DataError, yaml::yaml_scalar};
use coxswain_task::{StarterFile, StarterJob};

use super::data::{ENDINGS, list};
use crate::{
    found::{ending, files, folders, shards},
    sft,
    starter::Starter,
    trajectory::config::ImageData,
};

/// The run file; nothing if there are no images, or if they are those of chats and nobody asks for them.
pub fn starter(job: &StarterJob<'_>) -> Option<Result<StarterFile, DataError>> {
    if !job.asked && sft::has_chats(job.data) {
        return None;
    }
    let (path, domains) = place(job.data)?;
    let data = ImageData { domains, ..ImageData::default() };
    let images = match list(&path, &data) {
        Ok(listing) => listing.places.len() as u64,
        // Shards of something else.
        Err(_) if !job.asked && !path.is_dir() => return None,
        Err(error) => return Some(Err(error)),
    };
    let mut file = Starter::new(job, "trajectory");
    file.lines("extractor: # a frozen vision tower; the network learns from its activations");
    file.model(job, "Qwen2.5-VL");
    file.lines("  spatial_resolution: 7 # 49 positions an image\n");
    file.lines("network:\n  type: autoencoder # or vae, transformer\n");
    file.lines("data:").lines(format_args!("  path: {}", yaml_scalar(&path.display().to_string())));
    let names: Vec<_> = data.domains.iter().map(|name| yaml_scalar(name)).collect();
    if !names.is_empty() {
        file.lines(format_args!("  domains: [{}] # folders in `path`", names.join(", ")));
    }
    file.lines(format_args!("  # {images} images"));
    file.lines("  image_size: 224 # side in pixels: a multiple of 28");
    let training = file.holdout(images);
    file.lines("");
    let saw = match &*data.domains {
        [] => format!("{images} images"),
        domains => format!("{images} images in {} folders", domains.len()),
    };
    Some(Ok(StarterFile { saw, text: file.train(job, training) }))
}

/// `data.path` and `data.domains` of the images at a place.
fn place(place: &Path) -> Option<(PathBuf, Vec<String>)> {
    let has_images = |dir: &Path| files(dir).iter().any(|file| ENDINGS.contains(&&*ending(file)));
    if place.is_dir() && has_images(place) {
        return Some((place.to_path_buf(), Vec::new()));
    }
    let of_images = folders(place).into_iter().filter(|dir| has_images(dir));
    let domains: Vec<String> =
        of_images.filter_map(|dir| Some(dir.file_name()?.to_str()?.to_owned())).collect();
    if !domains.is_empty() {
        return Some((place.to_path_buf(), domains));
    }
    Some((shards(place)?.ok()?.0, Vec::new()))
}

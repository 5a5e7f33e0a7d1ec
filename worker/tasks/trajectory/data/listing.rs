//! Which images a run uses, and in which order: those of folders, or of tar shards.
//!
//! Images of several domains take turns, so that the first so many have as many of each, and so have those
//! that are held out.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_data::{
    DataError,
    shards::{MemberId, Shards, names_shards},
};
use coxswain_proto::{bounded, limits::MAX_PICTURE_BYTES};

use crate::{found::hidden, trajectory::config::ImageData};

/// Endings of the names of files that are read.
pub const ENDINGS: [&str; 3] = ["png", "jpg", "jpeg"];

/// Where an image lies.
#[derive(Clone, Debug)]
pub enum ImagePlace {
    /// By itself.
    File(PathBuf),
    /// In a shard.
    Member(Arc<Shards>, MemberId),
}

impl ImagePlace {
    /// The image's bytes.
    pub fn read_bytes(&self) -> Result<Vec<u8>, DataError> {
        match self {
            Self::File(path) => bounded::read(path, MAX_PICTURE_BYTES).map_err(DataError::io(path, "read")),
            Self::Member(shards, member) => shards.read_member(*member),
        }
    }

    /// What it is called, for people.
    pub fn name(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Member(shards, member) => shards.place(*member),
        }
    }

    /// What is wrong with it.
    pub fn fault(&self, fault: String) -> DataError {
        match self {
            Self::File(path) => {
                DataError::invalid(path, "(file)", fault, "restore, replace or remove the file")
            }
            Self::Member(shards, member) => shards.fault(*member, fault, "restore, replace or remove it"),
        }
    }
}

/// Images by domain.
#[derive(Debug)]
pub struct Listing {
    /// In the order of samples.
    pub places: Vec<ImagePlace>,
    /// The shards that they lie in, if they are in shards.
    pub shards: Option<Arc<Shards>>,
    /// Name of each domain, and how many of its images are used; one without a name where `data.domains` is
    /// empty.
    pub domains: Vec<(String, u64)>,
}

/// The images that a run uses.
pub fn list(path: &Path, data: &ImageData) -> Result<Listing, DataError> {
    if names_shards(path) {
        return in_shards(path, data);
    }
    let names = if data.domains.is_empty() { vec![String::new()] } else { data.domains.clone() };
    let mut folders = Vec::new();
    for name in &names {
        let dir = if name.is_empty() { path.to_path_buf() } else { path.join(name) };
        if !dir.is_dir() {
            let (there, field) =
                (folders_of(path), if name.is_empty() { "data.path" } else { "data.domains" });
            let remedy = match &*there {
                [] => "name a folder of images".to_owned(),
                there => format!("name some of {}", there.join(", ")),
            };
            return Err(DataError::invalid(&dir, field, "no such folder", remedy));
        }
        folders.push(images_of(&dir, name.is_empty())?.into_iter());
    }
    let most = data.num_samples.unwrap_or(u64::MAX);
    let mut listing = Listing {
        places: Vec::new(),
        shards: None,
        domains: names.into_iter().map(|name| (name, 0)).collect(),
    };
    // In turns, until all are through.
    loop {
        let before = listing.places.len();
        for (folder, (_, used)) in folders.iter_mut().zip(&mut listing.domains) {
            if (listing.places.len() as u64) < most
                && let Some(file) = folder.next()
            {
                listing.places.push(ImagePlace::File(file));
                *used += 1;
            }
        }
        if listing.places.len() == before {
            return Ok(listing);
        }
    }
}

/// The images of shards, in the order of their samples.
fn in_shards(path: &Path, data: &ImageData) -> Result<Listing, DataError> {
    if !data.domains.is_empty() {
        let remedy = "remove it, and name the shards to use in data.path, for instance {cats,dogs}-*.tar";
        return Err(DataError::invalid(
            path,
            "data.domains",
            "names folders, but data.path names shards",
            remedy,
        ));
    }
    let shards = Arc::new(Shards::open(path)?);
    let is_image = |member: &MemberId| {
        let ending = shards.ending(*member);
        ENDINGS.contains(&ending.rsplit('.').next().unwrap_or(ending))
    };
    let members = (0..shards.len()).flat_map(|sample| shards.members(sample)).filter(is_image);
    let most = data.num_samples.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX));
    let place = |member| ImagePlace::Member(shards.clone(), member);
    let places: Vec<_> = members.take(most).map(place).collect();
    if places.is_empty() {
        let remedy = "add .png, .jpg or .jpeg files to them, or name other shards";
        return Err(DataError::invalid(path, "(shards)", "have no image", remedy));
    }
    let domains = vec![(String::new(), places.len() as u64)];
    Ok(Listing { places, shards: Some(shards), domains })
}

/// The images right in a folder, by name.
fn images_of(dir: &Path, whole: bool) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(DataError::io(dir, "list"))? {
        let path = entry.map_err(DataError::io(dir, "list"))?.path();
        let ending = path.extension().and_then(|ending| ending.to_str()).map(str::to_lowercase);
        if !hidden(&path) && ending.is_some_and(|ending| ENDINGS.contains(&&*ending)) && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    if files.is_empty() {
        let folders = folders_of(dir);
        let remedy = match &*folders {
            [] => "put .png, .jpg or .jpeg files there, or name another folder".to_owned(),
            folders if whole => {
                format!("set data.domains to those of its folders that have images: {}", folders.join(", "))
            }
            folders => format!("name folders inside it: {}", folders.join(", ")),
        };
        return Err(DataError::invalid(dir, "(folder)", "has no image", remedy));
    }
    Ok(files)
}

fn folders_of(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir());
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().display().to_string()).collect();
    names.sort();
    names
}

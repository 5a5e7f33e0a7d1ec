//! Chats in tar shards: a sample has `.json` with the chat and its images, or `.txt` with what the assistant
//! says of them. Where it has both, `.json` is the chat if it has turns, and else something about the images,
//! as `img2dataset` writes it.

use std::path::Path;

use coxswain_data::{
    DataError, Fingerprint,
    shards::{MemberId, Shards},
    text::{NotText, decode, excerpt},
};

use super::{images::ChatImage, source::ChatSource, spelling::Chat};
use crate::sft::config::ChatData;

/// What stands behind the last dot of an image's name.
const IMAGES: [&str; 3] = ["png", "jpg", "jpeg"];
/// Bytes of the longest chat.
const LONGEST: u64 = 64 << 20;

/// Opened shards of chats.
pub struct ChatShards {
    shards: Shards,
}

impl ChatShards {
    /// Opens them; refused if the run says where paths of images begin, since they begin nowhere.
    pub fn in_files(path: &Path, data: &ChatData) -> Result<Self, DataError> {
        if let Some(images) = &data.images {
            let found = format!("is {images}, but images of shards are found next to their chats");
            return Err(DataError::invalid(path, "data.images", found, "remove the key"));
        }
        Ok(Self { shards: Shards::open(path)? })
    }

    /// Reads every chat, which `see` gets with its place, and finds its images. Names the texts, and names
    /// and sizes of everything else.
    pub fn check(&self, see: &mut dyn FnMut(u64, &Chat)) -> Result<Fingerprint, DataError> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.shards.fingerprint().0);
        for index in 0..self.len() {
            let (text, is_caption) = self.written(index)?;
            hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
            let refuse = |fault| self.fault(index, fault);
            let chat = self.parsed(index, &text, is_caption).map_err(refuse)?;
            self.found(index, &chat.images).map_err(refuse)?;
            see(index, &chat);
        }
        Ok(Fingerprint(*hasher.finalize().as_bytes()))
    }

    /// The text of a sample, and whether it is a caption.
    fn written(&self, index: u64) -> Result<(String, bool), DataError> {
        let read =
            |ending| self.shards.with_ending(index, ending).map(|member| self.decoded(member)).transpose();
        match (read("json")?, read("txt")?) {
            (Some(chat), None) => Ok((chat, false)),
            (Some(chat), Some(_)) if has_turns(&chat) => Ok((chat, false)),
            (_, Some(caption)) => Ok((caption, true)),
            (None, None) => {
                let fault = format!("has {}, but neither .json nor .txt", self.endings(index));
                Err(self.fault(index, format!("{fault}; add the chat to the sample, or take the sample out")))
            }
        }
    }

    fn decoded(&self, member: MemberId) -> Result<String, DataError> {
        if self.shards.bytes(member) > LONGEST {
            let remedy = "store images as members of the shard, not inside the chat";
            return Err(self.shards.fault(member, "is longer than 64 MiB", remedy));
        }
        let text = decode(self.shards.read_member(member)?);
        text.map_err(|NotText { found, remedy }| self.shards.fault(member, found, remedy))
    }

    fn parsed(&self, index: u64, text: &str, is_caption: bool) -> Result<Chat, String> {
        let images = self.images(index).map(|member| self.shards.ending(member).to_owned()).collect();
        if is_caption { Chat::caption(text.trim_end(), images) } else { Chat::parse_beside(text, images) }
    }

    /// The images of a sample, in the order of the shard.
    fn images(&self, index: u64) -> impl Iterator<Item = MemberId> {
        let is_image = |ending: &str| IMAGES.contains(&ending.rsplit('.').next().unwrap_or(ending));
        self.shards.members(index).filter(move |member| is_image(self.shards.ending(*member)))
    }

    /// The member that a chat means by a name: a path whose file has the member's ending, or that ending.
    fn image_named(&self, index: u64, name: &str) -> Result<MemberId, String> {
        let file = name.rsplit('/').next().unwrap_or(name).to_lowercase();
        let behind = file.split_once('.').map_or("", |(_, ending)| ending);
        let found = [&*file, behind].iter().find_map(|ending| self.shards.with_ending(index, ending));
        found.ok_or_else(|| {
            format!(
                "there is no image {} in the sample, which has {}; correct the name, or add the image to the shard",
                excerpt(name),
                self.endings(index)
            )
        })
    }

    /// The members of these images; two names of one are refused.
    fn found(&self, index: u64, images: &[ChatImage]) -> Result<(), String> {
        let names = images.iter().map(|image| &image.path);
        let members = names.clone().map(|name| self.image_named(index, name));
        let members = members.collect::<Result<Vec<_>, _>>()?;
        for (at, (member, name)) in members.iter().zip(names.clone()).enumerate() {
            let mut before = members[..at].iter().zip(names.clone());
            if let Some((_, other)) = before.find(|(other, named)| *other == member && *named != name) {
                return Err(format!(
                    "{other} and {name} are both read from the sample's one .{} file; name its images KEY.0.jpg, KEY.1.jpg and so on, after the sample",
                    self.shards.ending(*member)
                ));
            }
        }
        Ok(())
    }

    fn endings(&self, index: u64) -> String {
        let endings =
            self.shards.members(index).take(8).map(|member| format!(".{}", self.shards.ending(member)));
        endings.collect::<Vec<_>>().join(", ")
    }
}

impl ChatSource for ChatShards {
    fn len(&self) -> u64 {
        self.shards.len()
    }

    fn chat(&self, index: u64) -> Result<Chat, DataError> {
        if index >= self.len() {
            return Err(DataError::OutOfRange { what: "sample", index, len: self.len() });
        }
        let (text, is_caption) = self.written(index)?;
        self.parsed(index, &text, is_caption).map_err(|fault| self.fault(index, fault))
    }

    fn image(&self, index: u64, name: &str, most: u64) -> Result<Vec<u8>, String> {
        let member = self.image_named(index, name)?;
        self.shards.head(member, most).map_err(|error| error.to_string())
    }

    fn image_key(&self, index: u64, name: &str) -> String {
        format!("{index}/{name}")
    }

    fn fault(&self, index: u64, fault: String) -> DataError {
        let text = ["json", "txt"].iter().find_map(|ending| self.shards.with_ending(index, ending));
        match text.or_else(|| self.shards.members(index).next()) {
            Some(member) => {
                let (found, remedy) =
                    fault.rsplit_once("; ").unwrap_or((&fault, "repair the sample or take it out"));
                self.shards.fault(member, found, remedy)
            }
            None => DataError::OutOfRange { what: "sample", index, len: self.len() },
        }
    }

    fn remedy(&self) -> &'static str {
        "for each chat, write a .json file and its images, all with the same name up to the first dot"
    }

    fn describe(&self) -> String {
        format!(" {}", self.shards.describe())
    }

    fn warnings(&self) -> Vec<String> {
        self.shards.warnings()
    }
}

/// Whether the text of an object speaks of turns, without reading it all.
pub fn has_turns(text: &str) -> bool {
    ["\"messages\"", "\"conversations\""].iter().any(|key| text.contains(key))
}

//! What chats come from: the seam between the files that there are and the samples that are made of them.

use coxswain_data::DataError;

use super::spelling::Chat;

/// Chats by number, and the files of their images.
pub trait ChatSource: Send + Sync {
    /// Chats.
    fn len(&self) -> u64;

    /// Chat `index`; or what is wrong with it, and the remedy.
    fn chat(&self, index: u64) -> Result<Chat, DataError>;

    /// The first bytes of an image of chat `index`, at most so many; or what is wrong with it.
    fn image(&self, index: u64, name: &str, most: u64) -> Result<Vec<u8>, String>;

    /// Tells this image from those of all chats.
    fn image_key(&self, index: u64, name: &str) -> String;

    /// What is wrong with chat `index`, and the remedy.
    fn fault(&self, index: u64, fault: String) -> DataError;

    /// How to bring chats.
    fn remedy(&self) -> &'static str;

    /// Where they lie, for people; empty where the run file says it all.
    fn describe(&self) -> String {
        String::new()
    }

    /// What is probably not meant so: a line each.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }
}

//! Images of a chat: the paths that its line gives, the places that they take in its turns, and the sizes
//! that are asked for them.

use coxswain_models::{
    pretrained::pictures::{ImageProcessor, ImageShape, smart_resize},
    vision_language::{Message, Piece, Role},
};
use serde_json::{Map, Value};

/// An image of a chat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatImage {
    /// Where it is.
    pub path: String,
    /// How large it is to be shown.
    pub size: ImageSize,
}

impl From<String> for ChatImage {
    fn from(path: String) -> Self {
        Self { path, size: ImageSize::default() }
    }
}

/// The size that a chat asks for an image, as `qwen-vl-utils` reads it; the run's own bounds hold, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageSize {
    /// `resized_height` and `resized_width`: the size that the image has before it is fitted.
    resized: Option<(usize, usize)>,
    /// `min_pixels`.
    min: Option<usize>,
    /// `max_pixels`.
    max: Option<usize>,
}

impl ImageSize {
    /// The size in a piece, or in an entry of a list.
    fn from_value(value: &Value) -> Result<Self, String> {
        let number = |key: &str| match value.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(given) => match given.as_u64().and_then(|pixels| usize::try_from(pixels).ok()) {
                Some(pixels) if pixels > 0 => Ok(Some(pixels)),
                _ => Err(format!("`{key}` of an image is {given}; write a whole number above 0")),
            },
        };
        let resized = match (number("resized_height")?, number("resized_width")?) {
            (None, None) => None,
            (Some(height), Some(width)) => Some((height, width)),
            _ => return Err("an image has only `resized_height` or `resized_width`; give both".into()),
        };
        Ok(Self { resized, min: number("min_pixels")?, max: number("max_pixels")? })
    }

    /// The shape of an image of so many rows and columns, where the chat asks for a size.
    pub fn shape(self, images: &dyn ImageProcessor, stored: (usize, usize)) -> Result<ImageShape, String> {
        if self == Self::default() {
            return images.shape(stored.0, stored.1);
        }
        let shape = images.patches();
        let (height, width) = self.resized.unwrap_or(stored);
        let [min, max] = images.pixel_bounds();
        let max = self.max.map_or(max, |most| most.min(max));
        let min = self.min.map_or(min, |least| least.max(min)).min(max);
        let (height, width) = smart_resize(height, width, shape.patch * shape.merge, min, max)?;
        Ok([1, (height / shape.patch) as u32, (width / shape.patch) as u32])
    }
}

/// The images of a line, as they find their places.
pub struct Images {
    /// Images of the line's own list that have no place yet, first to last.
    open: std::vec::IntoIter<ChatImage>,
    listed: usize,
    /// Whether the list stands for one that the chat does not have: paths of its pieces replace it.
    assumed: bool,
    /// Images that have a place.
    placed: Vec<ChatImage>,
}

impl From<Vec<String>> for Images {
    fn from(listed: Vec<String>) -> Self {
        Self::listed(listed.into_iter().map(ChatImage::from).collect())
    }
}

impl Images {
    fn listed(listed: Vec<ChatImage>) -> Self {
        Self { listed: listed.len(), open: listed.into_iter(), assumed: false, placed: Vec::new() }
    }

    /// Images of a line, or those that lie beside one that lists none.
    pub fn from_fields(fields: &Map<String, Value>, beside: Vec<String>) -> Result<Self, String> {
        if !["images", "image"].iter().any(|key| fields.get(*key).is_some_and(|list| !list.is_null())) {
            return Ok(Self { assumed: true, ..Self::from(beside) });
        }
        let mut listed = Vec::new();
        for key in ["images", "image"] {
            match fields.get(key) {
                None | Some(Value::Null) => {}
                Some(Value::Array(list)) => {
                    for entry in list {
                        listed.push(image_of(entry, entry, key)?);
                    }
                }
                Some(one) => listed.push(image_of(one, one, key)?),
            }
        }
        Ok(Self::listed(listed))
    }

    /// The next of the line's list takes a place; `piece` may ask for its size.
    pub fn place_next(&mut self, piece: Option<&Value>) -> Result<(), String> {
        let listed = self.listed;
        let mut image = self.open.next().ok_or_else(|| {
            format!("has more image placeholders than paths in `images` ({listed}); give a path for each")
        })?;
        let asked =
            piece.map(ImageSize::from_value).transpose()?.filter(|asked| *asked != ImageSize::default());
        image.size = asked.unwrap_or(image.size);
        self.placed.push(image);
        Ok(())
    }

    /// The image that a piece of this kind gives under one of its keys takes a place.
    pub fn place(&mut self, given: &Value, piece: &Value, kind: &str) -> Result<(), String> {
        self.placed.push(image_of(given, piece, kind)?);
        Ok(())
    }

    /// The images in the order of their places; those that have no place at all come before the first text of
    /// the user.
    pub fn placed(mut self, messages: &mut [Message]) -> Result<Vec<ChatImage>, String> {
        let open: Vec<ChatImage> = self.open.collect();
        let has_own = self.placed.len() > self.listed - open.len();
        if open.is_empty() || (self.assumed && has_own) {
            return Ok(self.placed);
        }
        if open.len() != self.listed {
            return Err(format!(
                "lists {} images, but has placeholders for {}; write `<image>` once for each",
                self.listed,
                self.listed - open.len()
            ));
        }
        let first = messages.iter().position(|message| message.role == Role::User);
        let first =
            first.ok_or("has images, but no user turn to show them in; write `<image>` where they belong")?;
        // Pieces that bring their own paths before that turn keep their order.
        let before = messages[..first].iter().flat_map(|message| &message.pieces);
        let before = before.filter(|piece| **piece == Piece::Image).count();
        messages[first].pieces.splice(0..0, open.iter().map(|_| Piece::Image));
        self.placed.splice(before..before, open);
        Ok(self.placed)
    }
}

/// The image whose path is given as text, or under `url` or `path`, in a size that `asking` may have.
fn image_of(given: &Value, asking: &Value, key: &str) -> Result<ChatImage, String> {
    let nested = || ["path", "url"].iter().find_map(|field| given.get(*field));
    let text = given.as_str().or_else(|| nested().and_then(Value::as_str));
    let text = text.ok_or_else(|| format!("`{key}` gives no path of an image; write the path as text"))?;
    let path = text.strip_prefix("file://").unwrap_or(text);
    if path.contains("://") || path.starts_with("data:") || is_base64(path) {
        let shown: String = path.chars().take(40).collect();
        return Err(format!(
            "`{key}` is {shown:?}, but images are read from files; save it to a file and give its path"
        ));
    }
    Ok(ChatImage { path: path.to_owned(), size: ImageSize::from_value(asking)? })
}

/// Whether an image itself stands where its path is expected.
fn is_base64(text: &str) -> bool {
    // How PNG, JPEG, GIF and WebP begin. A path may begin so as well, and has a dot.
    let begins = ["iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR"].iter().any(|image| text.starts_with(image));
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"+/=\r\n".contains(&byte);
    begins && text.len() > 100 && text.bytes().all(is_letter)
}

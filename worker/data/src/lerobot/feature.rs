//! A feature of a data set: its type, the shape of a frame's value, names of the elements, and what it can be
//! used for.

use coxswain_proto::limits::MAX_FEATURE_VALUES;
use serde::Deserialize;
use serde_json::Value;

/// One entry of `features`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Feature {
    /// `float32`, `int64`, `image`, `video`, ...
    pub dtype: String,
    /// Axes of one frame's value.
    #[serde(default)]
    pub shape: Vec<usize>,
    /// Names of axes or elements, as written: a list, an object or null.
    #[serde(default)]
    pub names: Value,
    /// What LeRobot notes of a video: its codec, its rate.
    #[serde(default)]
    pub info: Value,
}

/// `3 (gripper)`; the number alone where the data set has no names.
pub fn dimension(dim: usize, names: &[String]) -> String {
    names.get(dim).map_or_else(|| dim.to_string(), |name| format!("{dim} ({name})"))
}

impl Feature {
    /// Elements of one frame's value. No feature has more than can be counted:
    /// [`Info::read`](super::info::Info::read) refuses it.
    pub fn width(&self) -> usize {
        self.shape.iter().product()
    }

    /// Names of the elements of one frame's value, where there is one for each: `[x, y]`, or a map with one
    /// list, `{motors: [x, y]}`.
    pub fn element_names(&self) -> Vec<String> {
        let list = match &self.names {
            Value::Object(map) if map.len() == 1 => map.values().next().and_then(Value::as_array),
            names => names.as_array(),
        };
        let names: Option<Vec<_>> =
            list.and_then(|list| list.iter().map(|name| name.as_str().map(str::to_owned)).collect());
        names.filter(|names| names.len() == self.width()).unwrap_or_default()
    }

    /// Whether a frame's value has no more elements than any can have.
    pub(super) fn is_possible(&self) -> bool {
        let width = self.shape.iter().try_fold(1usize, |width, axis| width.checked_mul(*axis));
        width.is_some_and(|width| width <= MAX_FEATURE_VALUES)
    }

    /// True for images stored in parquet.
    pub fn is_image(&self) -> bool {
        self.dtype == "image"
    }

    /// True for cameras stored as video files.
    pub fn is_video(&self) -> bool {
        self.dtype == "video"
    }

    /// True for cameras of either kind, whose frames are pictures in colour.
    pub fn is_camera(&self) -> bool {
        self.is_image() || (self.is_video() && !self.is_depth())
    }

    /// True for depth maps, as LeRobot marks them.
    pub fn is_depth(&self) -> bool {
        let marked = |key: &str| self.info.get(key).and_then(Value::as_bool).unwrap_or(false);
        marked("video.is_depth_map") || marked("is_depth_map")
    }

    /// True for numbers that can be fed to a model.
    pub fn is_number(&self) -> bool {
        matches!(
            self.dtype.as_str(),
            "float16" | "float32" | "float64" | "int8" | "int16" | "int32" | "int64" | "uint8" | "bool"
        )
    }

    /// Height and width of an image feature. `names` says which axis is the channel; without names it is the
    /// first if that alone can be one, and else the last, as LeRobot writes it.
    pub fn image_size(&self) -> Option<(usize, usize)> {
        let [a, b, c] = self.shape[..] else { return None };
        let named = |axis: usize| {
            matches!(self.names.get(axis).and_then(Value::as_str), Some("channel" | "channels"))
        };
        let channels = |size: usize| matches!(size, 1 | 3 | 4);
        let first = named(0) || (!named(2) && channels(a) && !channels(c));
        if first { Some((b, c)) } else { Some((a, b)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_have_names_where_each_has_one() {
        let names = |shape: Value, names: Value| {
            let feature = serde_json::json!({"dtype": "float32", "shape": shape, "names": names});
            serde_json::from_value::<Feature>(feature).unwrap().element_names()
        };
        let two = serde_json::json!(["x", "gripper"]);
        assert_eq!(names(serde_json::json!([2]), two.clone()), ["x", "gripper"]);
        assert_eq!(names(serde_json::json!([2]), serde_json::json!({"motors": two})), ["x", "gripper"]);
        for other in [
            Value::Null,
            serde_json::json!(["all"]),
            serde_json::json!([1, 2]),
            serde_json::json!({"x": 0, "y": 1}),
        ] {
            assert!(names(serde_json::json!([2]), other).is_empty());
        }
    }

    #[test]
    fn the_channel_axis_is_found_by_name() {
        let feature = |names: Value, shape: [usize; 3]| Feature {
            dtype: "image".into(),
            shape: shape.into(),
            names,
            info: Value::Null,
        };
        let hwc = feature(serde_json::json!(["height", "width", "channels"]), [48, 64, 3]);
        let chw = feature(serde_json::json!(["channels", "height", "width"]), [3, 48, 64]);
        assert_eq!(hwc.image_size(), Some((48, 64)));
        assert_eq!(chw.image_size(), Some((48, 64)));
    }

    #[test]
    fn without_names_the_channel_axis_is_the_one_that_can_be() {
        let size = |shape: [usize; 3]| {
            Feature { dtype: "image".into(), shape: shape.into(), names: Value::Null, info: Value::Null }
                .image_size()
        };
        assert_eq!(size([3, 480, 640]), Some((480, 640)));
        assert_eq!(size([480, 640, 3]), Some((480, 640)));
        assert_eq!(
            size([3, 5, 4]),
            Some((3, 5)),
            "an image of three rows: both can be, and the last is LeRobot's"
        );
    }
}

//! Which devices are near a range of memory: behind the same bridge or on the same NUMA node.

/// A set of devices, by their indexes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NearDevices(u64);

impl NearDevices {
    /// All devices: nothing is known about the memory, or no device is nearer than others.
    pub(crate) const ALL: Self = Self(u64::MAX);

    /// Returns the set of the devices whose names are listed, or all if none is.
    pub(crate) fn named<'a>(devices: impl Iterator<Item = &'a str>, names: &[String]) -> Self {
        let is_near = |(index, device): (usize, &str)| {
            names.iter().any(|name| name == device).then_some(index)
        };
        let bits = devices.enumerate().filter_map(is_near).filter(|index| *index < 64);
        match bits.fold(0, |set, index| set | 1 << index) {
            0 => Self::ALL,
            set => Self(set),
        }
    }

    /// Returns whether a device is in the set. Devices beyond the 64th are in each.
    pub(crate) fn contains(self, device: usize) -> bool {
        device >= 64 || self.0 >> device & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_has_the_named_devices_or_all() {
        let devices = ["a", "b", "c"];
        let named = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            NearDevices::named(devices.into_iter(), &names)
        };
        let near = named(&["c", "x", "a"]);
        assert_eq!([0, 1, 2, 100].map(|device| near.contains(device)), [true, false, true, true]);
        assert_eq!(named(&["x"]), NearDevices::ALL);
        assert_eq!(named(&[]), NearDevices::ALL);
    }
}

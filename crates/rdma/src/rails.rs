//! The pairs of devices over which a peer is reached, in the order of preference.

use crate::settings::PeerAffinity;

/// Pairs of an own and a remote device, by their indexes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Rails {
    pub(crate) pairs: Vec<(usize, usize)>,
    /// How many of the first pairs are connected from the start: one for each device, and those that the
    /// settings prefer.
    pub(crate) primary: usize,
}

impl Rails {
    /// Pairs devices by their names. `near` lists remote devices that come before others; there is at least
    /// one device on each side.
    pub(crate) fn between(
        own: &[&str],
        remote: &[&str],
        near: &[usize],
        affinity: &PeerAffinity,
    ) -> Self {
        let far = (0..remote.len()).filter(|index| !near.contains(index));
        let remotes: Vec<_> = near.iter().copied().chain(far).collect();
        let mut pairs = Vec::new();
        for (local, name) in own.iter().enumerate() {
            let preferred = remotes.iter().filter(|index| affinity.prefers(name, remote[**index]));
            pairs.extend(preferred.map(|index| (local, *index)));
        }
        // One pair for each device that has no preferred one.
        let preferred = pairs.clone();
        for step in 0..own.len().max(remotes.len()) {
            let (local, remote) = (step % own.len(), remotes[step % remotes.len()]);
            if !preferred.iter().any(|pair| pair.0 == local) {
                pairs.push((local, remote));
            }
        }
        let primary = pairs.len();
        // Then the other combinations, for when devices fail.
        for shift in 0..remotes.len() {
            for local in 0..own.len() {
                let pair = (local, remotes[(local + shift) % remotes.len()]);
                if !pairs.contains(&pair) {
                    pairs.push(pair);
                }
            }
        }
        Self { pairs, primary }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Pairs<'a> = &'a [(usize, usize)];

    fn check(rails: &Rails, primary: Pairs<'_>, others: Pairs<'_>) {
        let expected = Rails { pairs: [primary, others].concat(), primary: primary.len() };
        assert_eq!(*rails, expected);
    }

    #[test]
    fn each_device_has_a_pair_from_the_start() {
        let two = ["a", "b"];
        let between =
            |own: &[&str], remote: &[&str]| Rails::between(own, remote, &[], &PeerAffinity::None);
        check(&between(&two, &two), &[(0, 0), (1, 1)], &[(0, 1), (1, 0)]);
        check(&between(&two, &["x"]), &[(0, 0), (1, 0)], &[]);
        check(&between(&["a"], &["x", "y", "z"]), &[(0, 0), (0, 1), (0, 2)], &[]);
    }

    #[test]
    fn near_devices_of_the_peer_come_first() {
        let rails = Rails::between(&["a"], &["x", "y"], &[1], &PeerAffinity::None);
        check(&rails, &[(0, 1), (0, 0)], &[]);
    }

    #[test]
    fn preferred_pairs_come_before_others() {
        let between = |own: &[&str], remote: &[&str]| {
            Rails::between(own, remote, &[], &PeerAffinity::SameName)
        };
        check(&between(&["a", "b"], &["b", "a"]), &[(0, 1), (1, 0)], &[(0, 0), (1, 1)]);
        // A device without a preferred one still gets a pair.
        check(&between(&["a", "c"], &["a", "b"]), &[(0, 0), (1, 1)], &[(0, 1), (1, 0)]);
    }
}

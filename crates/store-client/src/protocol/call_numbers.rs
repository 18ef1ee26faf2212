//! Numbers of calls that are not idempotent, by which the master knows their repetitions.

/// The numbered calls of a client that are in progress.
#[derive(Debug, Default)]
pub struct CallNumbers {
    last: u64,
    /// In ascending order.
    open: Vec<u64>,
}

impl CallNumbers {
    /// Returns the number of a new call, and the number below which every call of this client was
    /// answered or given up.
    pub fn begin(&mut self) -> (u64, u64) {
        self.last += 1;
        self.open.push(self.last);
        (self.last, self.open[0])
    }

    /// Records that a call was answered or given up.
    pub fn end(&mut self, number: u64) {
        self.open.retain(|&open| open != number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_call_in_progress_counts_as_answered() {
        let mut numbers = CallNumbers::default();
        assert_eq!(numbers.begin(), (1, 1));
        assert_eq!(numbers.begin(), (2, 1));
        numbers.end(1);
        assert_eq!(numbers.begin(), (3, 2));
        numbers.end(3);
        numbers.end(2);
        assert_eq!(numbers.begin(), (4, 4));
    }
}

//! A list that is nearly always of one: the copies of an object, the memory of a value. One item
//! takes no allocation.

use std::ops::{Deref, DerefMut};

/// Items in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Few<T> {
    /// Exactly one.
    One([T; 1]),
    /// Any number.
    Many(Vec<T>),
}

impl<T> Deref for Few<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::One(one) => one,
            Self::Many(many) => many,
        }
    }
}

impl<T> DerefMut for Few<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::One(one) => one,
            Self::Many(many) => many,
        }
    }
}

impl<T> Default for Few<T> {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

impl<T> From<Few<T>> for Vec<T> {
    fn from(few: Few<T>) -> Self {
        match few {
            Few::One(one) => Self::from(one),
            Few::Many(many) => many,
        }
    }
}

impl<T> FromIterator<T> for Few<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        let mut items = items.into_iter();
        let Some(first) = items.next() else { return Self::Many(Vec::new()) };
        let Some(second) = items.next() else { return Self::One([first]) };
        let mut many = Vec::with_capacity(2 + items.size_hint().0);
        many.extend([first, second]);
        many.extend(items);
        Self::Many(many)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_number_of_items_comes_back_in_order() {
        for count in 0..5 {
            let few: Few<usize> = (0..count).collect();
            assert_eq!(*few, (0..count).collect::<Vec<_>>());
            assert_eq!(matches!(few, Few::One(_)), count == 1);
            assert_eq!(Vec::from(few), (0..count).collect::<Vec<_>>());
        }
    }
}

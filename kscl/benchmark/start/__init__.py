"""From a prepared data set and a number of minutes to a suite file with every choice explained."""

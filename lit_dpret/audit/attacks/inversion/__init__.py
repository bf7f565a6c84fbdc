"""What an embedding tells of its text: does it help to predict words, does it name the text, can it be written out?"""
